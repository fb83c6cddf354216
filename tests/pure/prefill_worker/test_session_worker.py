"""PrefillSession of a prefill worker over a fake engine, without a server: what its stream takes and tells."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire

from cluster_core.engine_jobs import SamplingSpec
from decode_worker.service import DecodeService
from prefill_worker.service import PrefillService
from tests.fakes.cluster import until
from tests.fakes.engine import FakeEngine, expected_text


class Aborted(Exception):
    pass


class StreamContext:
    """The part of a ServicerContext that reads and writes a stream."""

    def __init__(self) -> None:
        self.inputs: asyncio.Queue[Any] = asyncio.Queue()
        self.written: list[wire.PrefillSessionResponse] = []
        self.code = self.details = ""
        self.has_begun = False

    async def read(self) -> Any:
        return await self.inputs.get()

    async def send_initial_metadata(self, _metadata: Any) -> None:
        self.has_begun = True

    async def write(self, message: wire.PrefillSessionResponse) -> None:
        """Where its answer has not begun, gRPC could not end a call that gives this up."""
        assert self.has_begun
        await asyncio.sleep(0)
        self.written.append(message)

    async def abort(self, code: grpc.StatusCode, details: str, _metadata: Any) -> None:
        self.code, self.details = code.name, details
        raise Aborted

    def send(self, **event: Any) -> None:
        self.inputs.put_nowait(wire.PrefillSessionRequest(**event))

    def open(self, prompt: str = "hello", mode: str = "APPEND", number: int = 3, **sampling: Any) -> None:
        self.send(
            open=wire.PrefillSessionOpen(
                request_id="r#1",
                generation=number,
                mode=generation.SessionMode.Value(f"SESSION_MODE_{mode}"),
                token_ids=prompt.encode(),
                sampling=generation.SamplingParams(**{"max_tokens": 6, "temperature": 0.0, **sampling}),
                hand_off=True,
            )
        )

    def append(self, text: str) -> None:
        self.send(append=wire.PrefillSessionAppend(token_ids=text.encode()))

    def update(self, keep: int, text: str) -> None:
        self.send(update=wire.PrefillSessionUpdate(keep_tokens=keep, token_ids=text.encode()))

    def finish(self, text: str = "") -> None:
        self.send(finish=wire.PrefillSessionFinish(token_ids=text.encode()))

    @property
    def prefilled(self) -> wire.PrefillResponse:
        assert [message.HasField("prefilled") for message in self.written] == [False] * (len(self.written) - 1) + [True]
        return self.written[-1].prefilled

    @property
    def progress(self) -> list[generation.SessionProgress]:
        return [message.progress for message in self.written if message.HasField("progress")]


def record(state: wire.WorkerState.ValueType = wire.WORKER_STATE_READY) -> wire.WorkerRegistration:
    return wire.WorkerRegistration(worker_id="w-0", generation=3, state=state)


@asynccontextmanager
async def serving(
    engine: FakeEngine, *, interval_ms: int = 0, state: wire.WorkerState.ValueType = wire.WORKER_STATE_READY
) -> AsyncIterator[tuple[StreamContext, "asyncio.Task[None]"]]:
    """A call that runs, and must have left nothing but a lease when it has ended."""
    context: Any = StreamContext()
    service = PrefillService(engine, record(state), lambda: None, progress_interval_ms=interval_ms)
    call = asyncio.create_task(service.PrefillSession(iter(()), context))  # type: ignore[arg-type]
    try:
        yield context, call
    finally:
        call.cancel()
        await asyncio.wait({call})
    assert engine.status().load.running_requests == 0


async def refusal(engine: FakeEngine, *sent: Any, **values: Any) -> tuple[str, str]:
    async with serving(engine, **values) as (context, call):
        for send in sent:
            send(context)
        with pytest.raises(Aborted):
            await call
        return context.code, context.details


def first_letter(prompt: str) -> str:
    return expected_text(tuple(prompt.encode()), SamplingSpec(max_tokens=1, temperature=0.0))


async def test_a_session_answers_with_the_first_token_its_lease_and_its_record() -> None:
    engine = FakeEngine()
    async with serving(engine) as (context, call):
        context.open("hello")
        context.append(" world")
        context.finish("!")
        await call

    response = context.prefilled
    assert response.first.text == first_letter("hello world!")
    assert (response.handoff.lease_id, response.handoff.generation) == ("r#1", 3)
    assert response.finish_reason == generation.FINISH_REASON_UNSPECIFIED
    assert response.session.tokens.prompt_tokens == 12
    assert response.session.tokens.inputs == 1
    assert response.session.events[-1].kind == generation.SESSION_EVENT_KIND_FINISHED
    assert engine.status().load.leased_handoffs == 1


async def test_an_update_replaces_what_follows_the_tokens_it_keeps() -> None:
    async with serving(FakeEngine()) as (context, call):
        context.open("hello", "UPDATE")
        context.append(" world")
        context.update(6, "moon")
        context.append("light")
        context.update(10, "s")
        context.finish()
        await call

    assert context.prefilled.first.text == first_letter("hello moons")


async def test_the_first_progress_comes_at_once_and_tells_what_the_session_was_opened_with() -> None:
    engine = FakeEngine()
    engine.compute_at_most(0)
    async with serving(engine) as (context, _):
        context.open("hello")
        await until(lambda: bool(context.written))

    assert context.progress == [generation.SessionProgress(received_tokens=5, prompt_tokens=5)]


async def test_progress_between_is_left_out_and_the_latest_is_told() -> None:
    engine = FakeEngine()
    async with serving(engine, interval_ms=100) as (context, _):
        context.open("hello")
        await until(lambda: bool(context.written))
        for _ in range(50):
            context.append("x")
        await until(lambda: engine.sessions[0].progress().ready_tokens == 54)
        await until(lambda: len(context.written) > 1)

    assert [progress.inputs for progress in context.progress[1:]] == [50]


async def test_nothing_is_told_while_nothing_changes() -> None:
    engine = FakeEngine()
    async with serving(engine) as (context, _):
        context.open("hello")
        await until(lambda: bool(context.progress) and context.progress[-1].ready_tokens == 4)
        told = len(context.written)
        for _ in range(200):
            await asyncio.sleep(0)

        assert len(context.written) == told


@pytest.mark.parametrize("computed", [False, True])
async def test_a_call_that_is_cancelled_closes_the_session(computed: bool) -> None:
    engine = FakeEngine()
    async with serving(engine) as (context, call):
        context.open("hello")
        await until(lambda: engine.status().load.running_requests == 1)
        if computed:
            await until(lambda: engine.sessions[0].progress().ready_tokens == 4)
        call.cancel()
        await until(lambda: engine.status().load.running_requests == 0)

    assert engine.status().load.free_blocks == engine.status().load.total_blocks


async def test_a_call_that_is_cancelled_while_the_answer_is_computed_closes_the_session() -> None:
    engine = FakeEngine()
    engine.hold_before(0)
    async with serving(engine) as (context, call):
        context.open("hello")
        context.finish()
        await engine.held.wait()
        call.cancel()
        await until(lambda: engine.status().load.running_requests == 0)


async def test_the_death_of_the_engine_ends_a_session_that_waits_for_input_as_unavailable() -> None:
    engine = FakeEngine()
    async with serving(engine) as (context, call):
        context.open("hello")
        await until(lambda: bool(engine.sessions) and engine.sessions[0].progress().ready_tokens == 4)
        engine.die("out of luck")
        with pytest.raises(Aborted):
            await call

    assert (context.code, context.details) == ("UNAVAILABLE", "the engine died: out of luck")


@pytest.mark.parametrize(
    ("sent", "code", "text"),
    [
        ([lambda c: c.append("x")], "INVALID_ARGUMENT", "event: the first message must be `open`"),
        ([lambda c: c.inputs.put_nowait(grpc.aio.EOF)], "INVALID_ARGUMENT", "event: the first message must be `open`"),  # type: ignore[attr-defined]
        ([lambda c: c.open(number=4)], "FAILED_PRECONDITION", "the call is for generation 4 of w-0, this is 3"),
        ([lambda c: c.open(mode="UNSPECIFIED")], "INVALID_ARGUMENT", "open.mode: must be APPEND or UPDATE"),
        ([lambda c: c.open(), lambda c: c.open()], "INVALID_ARGUMENT", "event: must be append, update or finish"),
        ([lambda c: c.open(), lambda c: c.update(0, "x")], "FAILED_PRECONDITION", "update: a session in APPEND mode"),
        (
            [lambda c: c.open(mode="UPDATE"), lambda c: c.update(6, "x")],
            "INVALID_ARGUMENT",
            "update.keep_tokens: the prompt has 5 tokens",
        ),
        ([lambda c: c.open(""), lambda c: c.finish()], "INVALID_ARGUMENT", "the prompt is empty"),
        ([lambda c: c.open(), lambda c: c.append("x" * 5000)], "OUT_OF_RANGE", "the prompt would have 5005 tokens"),
        (
            [lambda c: c.open(), lambda c: c.inputs.put_nowait(grpc.aio.EOF)],  # type: ignore[attr-defined]
            "FAILED_PRECONDITION",
            "the stream was closed before `finish`",
        ),
    ],
)
async def test_what_the_router_never_sends_ends_the_call_with_a_sentence(sent: list[Any], code: str, text: str) -> None:
    status, details = await refusal(FakeEngine(), *sent)

    assert status == code
    assert details.startswith(text)


async def test_a_draining_worker_takes_no_session() -> None:
    answer = await refusal(FakeEngine(), lambda c: c.open(), state=wire.WORKER_STATE_DRAINING)

    assert answer == ("ABORTED", "worker w-0 is draining")


async def test_a_decode_worker_has_no_sessions() -> None:
    context: Any = StreamContext()
    with pytest.raises(Aborted):
        await DecodeService(FakeEngine(), record(), lambda: None).PrefillSession(iter(()), context)  # type: ignore[arg-type]

    assert context.code == "UNIMPLEMENTED"


async def test_the_text_of_a_first_token_is_held_back_as_for_a_whole_prompt() -> None:
    async with serving(FakeEngine()) as (context, call):
        context.open("hello", stop=["zzzz"])
        context.finish()
        await call

    assert (context.prefilled.first.text, len(context.prefilled.first.token_ids)) == ("", 1)
