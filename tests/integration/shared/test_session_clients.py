"""What clients of streaming sessions do wrong, or leave unfinished: nothing stays held, and answers stay right."""

import functools
import random
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import pytest
from rachis import AsyncClient, text_prompt
from rachis.v1 import generation_pb2 as generation

from command_line.own_service import Target
from tests.fakes.answers import tokens_of
from tests.fakes.session_call import SessionCall
from tests.integration.conftest import all_blocks_free, until
from tests.integration.session_play import answers_as, idle, session_call

pytestmark = pytest.mark.integration

LONG = 500


@pytest.fixture(autouse=True)
async def nothing_is_left(client: AsyncClient) -> AsyncIterator[None]:
    """After every test: no block held, no lease, nothing in flight."""
    yield
    await until(functools.partial(idle, client), "nothing is left")


@pytest.fixture
def other(small: tuple[Target, AsyncClient]) -> AsyncClient:
    """The small service, as one that has seen nothing of what the shared one is asked."""
    return small[1]


@pytest.fixture
async def call(target: Target) -> AsyncIterator[SessionCall]:
    """A session of the shared service, message by message; not open yet."""
    async with session_call(target) as session:
        yield session


# What a session may not do leaves it as it is.


@pytest.mark.parametrize("kind", ["append", "update"])
async def test_context_over_the_models_length_is_refused_and_the_session_answers_right(
    other: AsyncClient, call: SessionCall, kind: str
) -> None:
    await call.open("it was ", "UPDATE")
    await call.append("blue and ")
    if kind == "append":
        await call.append("x" * 4096)
    else:
        await call.update(1, "x" * 2048, "y" * 2048)
    status, name, number = await call.refused()
    assert (status, name.partition(".")[0], number) == ("OUT_OF_RANGE", kind, 3)
    await call.append("green")
    await call.finish(".")
    await answers_as(other, call, "it was blue and green.")


@pytest.mark.parametrize("after_events", [0, 1, 3])
async def test_an_update_during_hand_off_and_decode_is_refused_and_the_answer_goes_on(
    other: AsyncClient, call: SessionCall, after_events: int
) -> None:
    text = " ".join(f"word {number}" for number in range(150))
    # On a busy machine a short answer would have ended before its client gets to it.
    await call.open(text, "UPDATE", max_tokens=LONG, ignore_eos=True)
    await call.finish("!")
    events = [await call.next_event() for _ in range(after_events)]
    await call.update(1, "something else")
    await call.append("and more")
    events += await call.answer()
    refused = [event.refused for event in events if event is not None and event.HasField("refused")]
    assert [(each.status, each.field) for each in refused] == [
        ("FAILED_PRECONDITION", "update"),
        ("FAILED_PRECONDITION", "append"),
    ]
    answer = [event for event in events if event is not None and not event.HasField("refused")]
    expected = await other.generate(text_prompt(f"{text}!"), temperature=0, max_tokens=LONG, ignore_eos=True)
    assert tokens_of(answer) == expected.token_ids
    assert answer[-1].completion.route.handoff == generation.HANDOFF_OUTCOME_PULLED


# Clients that leave.


async def cancel_the_call(session: SessionCall) -> None:
    session.call.cancel()


async def cancel_by_message(session: SessionCall) -> None:
    await session.send(cancel={})


async def close_its_side(session: SessionCall) -> None:
    await session.call.done_writing()


@pytest.mark.parametrize(
    ("when", "leave"),
    [
        ("taken in", cancel_the_call),
        ("taken in", cancel_by_message),
        ("taken in", close_its_side),
        ("computed", cancel_the_call),
        ("computed", cancel_by_message),
        ("computed", close_its_side),
        ("answering", cancel_the_call),
        ("answering", cancel_by_message),
    ],
)
async def test_a_client_that_leaves_gives_everything_back(
    client: AsyncClient, call: SessionCall, when: str, leave: Callable[[SessionCall], Awaitable[None]]
) -> None:
    cancelled = (await client.router_status()).outcomes["cancelled"]
    await call.open("", max_tokens=2000, ignore_eos=True)
    await call.append("".join(random.Random(f"{when} {leave.__name__}").choices("abcdefgh ", k=2000)))
    await call.progressed(lambda progress: progress.inputs == 1)
    if when == "computed":
        await call.progressed(lambda progress: progress.ready_tokens >= 1999)
        assert not await all_blocks_free(client)
    elif when == "answering":
        await call.finish()
        await call.event("first_token")
        await call.event("delta")
    await leave(call)
    if leave is not cancel_the_call:
        assert (await call.failure()).code() is grpc.StatusCode.CANCELLED
    await until(functools.partial(idle, client), "everything is given back")
    assert (await client.router_status()).outcomes["cancelled"] == cancelled + 1


async def test_a_client_that_leaves_during_the_hand_off_gives_everything_back_by_its_deadline(
    small: tuple[Target, AsyncClient],
) -> None:
    target, client = small
    async with session_call(target) as session:
        await session.open("a page " * 250, max_tokens=500, ignore_eos=True)
        await session.finish()
        await session.event("first_token")
        session.call.cancel()
        await until(functools.partial(idle, client), "everything is given back")


async def test_a_client_that_closes_its_side_after_finish_hears_the_whole_answer(
    other: AsyncClient, call: SessionCall
) -> None:
    await call.open("one, two, ")
    await call.append("three, ")
    await call.finish("four")
    await call.call.done_writing()
    await answers_as(other, call, "one, two, three, four")
