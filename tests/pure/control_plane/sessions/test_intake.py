"""A session takes a message in once it may be computed, and all of it in one turn of the loop."""

import asyncio

import pytest
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import router_pb2 as api
from rachis.v1 import worker_pb2 as wire

from cluster_core.errors import OutOfRangeError, OverloadedError
from control_plane.intake.prompt_memory import TOKEN_BYTES, PromptMemory
from control_plane.sessions.intake import SessionIntake
from control_plane.sessions.session import Append, Change, Finish, Session, Update
from tests.fakes.cluster import BytesTokenizer

MODEL = wire.ModelInfo(name="fake", vocabulary_size=256, max_model_len=512)


def append(text: str) -> api.StreamGenerateRequest:
    return api.StreamGenerateRequest(append=api.SessionAppend(piece=api.SessionPiece(text=text)))


def update(revision: int, text: str) -> api.StreamGenerateRequest:
    context = [api.SessionPiece(text=text)]
    return api.StreamGenerateRequest(update=api.SessionUpdate(revision=revision, context=context))


FINISH = api.StreamGenerateRequest(finish=api.SessionFinish())


class World:
    """A session that begins with `a`, at a router that admits what comes when the test says so."""

    def __init__(self, memory_tokens: int = 1000, room: int = 20) -> None:
        opened = api.SessionOpen(mode=generation.SESSION_MODE_UPDATE, prefix=generation.PromptInput(text="a"))
        self.session = Session(opened.mode, list(b"a"), [], max_prompt_tokens=room)
        self.memory = PromptMemory(memory_tokens * TOKEN_BYTES)
        self.asked: list[Change] = []
        self.has_asked, self.free = asyncio.Event(), asyncio.Event()
        with self.memory.holding(1) as held:
            self.intake = SessionIntake(self.session, opened, BytesTokenizer(""), MODEL, held, self._admit)

    async def _admit(self, change: Change) -> None:
        self.asked.append(change)
        self.has_asked.set()
        await self.free.wait()


@pytest.mark.parametrize(
    ("message", "command", "after"),
    [
        (append("bc"), Append(list(b"bc")), b"abc"),
        (update(1, "x"), Update(1, list(b"x")), b"ax"),
        (FINISH, Finish([]), b"a"),
    ],
    ids=["append", "update", "finish"],
)
async def test_a_session_takes_nothing_in_while_its_input_waits_for_a_slot(
    message: api.StreamGenerateRequest, command: object, after: bytes
) -> None:
    world = World()
    session = world.session
    taking = asyncio.create_task(world.intake.take(message))
    await world.has_asked.wait()
    assert (bytes(session.tokens), session.finished, session.revision, session.inputs) == (b"a", False, None, 0)
    assert world.asked[0].command == command

    world.free.set()

    assert await taking == command
    assert bytes(session.tokens) == after and session.finished is (message is FINISH)
    session.check_invariants()


async def test_an_input_that_gets_no_slot_changes_nothing() -> None:
    world = World()

    async def refuse(change: Change) -> None:
        raise OverloadedError("the queue is full", retry_after_ms=100)

    # In place of the one that waits.
    world.intake._admit = refuse
    with pytest.raises(OverloadedError, match="the queue is full"):
        await world.intake.take(append("bc"))
    assert (bytes(world.session.tokens), world.session.inputs) == (b"a", 0)
    assert world.memory.used_bytes == TOKEN_BYTES


async def test_what_is_refused_or_has_no_memory_asks_for_no_slot() -> None:
    world = World(memory_tokens=10)
    with pytest.raises(OutOfRangeError):
        await world.intake.take(append("b" * 20))
    with pytest.raises(OverloadedError, match=r"router\.max_prompt_mib"):
        await world.intake.take(append("b" * 10))
    assert world.asked == [] and world.memory.used_bytes == TOKEN_BYTES


async def test_the_tokens_of_an_input_take_memory_while_it_waits_for_a_slot() -> None:
    world = World()
    taking = asyncio.create_task(world.intake.take(append("bc")))
    await world.has_asked.wait()
    assert world.memory.used_bytes == 3 * TOKEN_BYTES
    world.free.set()
    await taking
    assert world.memory.used_bytes == 3 * TOKEN_BYTES
