"""A router's stream at a decode worker: one message for what its calls put in one turn, and how it ends."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire

from cluster_core.engine_jobs import SamplingSpec
from cluster_core.errors import InvalidInputError, UnavailableError
from cluster_wire.step_outputs import Row, Unread, rows_of
from decode_worker.output_streams import MOST_ON_THEIR_WAY, ROWS_TO_ACKNOWLEDGE, OutputStreams
from decode_worker.service import DecodeService
from tests.fakes.engine import FakeEngine, expected_text
from tests.pure.worker_runtime.worker_calls import PROMPT, Aborted, RecordingContext, context, registration

STREAM = "s"


def request(call: int, max_tokens: int = 6, **values: object) -> wire.DecodeRequest:
    return wire.DecodeRequest(
        request_id=f"r#{call}",
        generation=3,
        token_ids=PROMPT,
        sampling=generation.SamplingParams(max_tokens=max_tokens, temperature=0.0),
        output_stream=STREAM,
        output_call=call,
        **values,  # type: ignore[arg-type]
    )


class Router(RecordingContext):
    """What the worker's stream reads from and writes to."""

    def __init__(self) -> None:
        self.requests: asyncio.Queue[Any] = asyncio.Queue()
        self.requests.put_nowait(wire.StreamOutputsRequest(generation=3, stream_id=STREAM))
        self.messages: asyncio.Queue[wire.StreamOutputsResponse] = asyncio.Queue()

    async def read(self) -> Any:
        return await self.requests.get()

    async def write(self, message: wire.StreamOutputsResponse) -> None:
        self.messages.put_nowait(message)


class Worker:
    """A decode worker with one router's stream open."""

    def __init__(self, engine: FakeEngine) -> None:
        self.service = DecodeService(engine, registration(), lambda: None)
        self.router = Router()
        self.streaming = asyncio.create_task(self.service.StreamOutputs(iter(()), self.router))  # type: ignore[arg-type]
        self.messages: list[wire.StreamOutputsResponse] = []
        self.rows: list[Row] = []

    async def read(self, *, takes: bool = True) -> wire.StreamOutputsResponse:
        message = await self.router.messages.get()
        self.messages.append(message)
        self.rows.extend(rows_of(message))
        if takes and message.acknowledge:
            self.router.requests.put_nowait(wire.StreamOutputsRequest())
        return message

    async def decode(self, call: int, max_tokens: int = 6) -> None:
        """To its end: nothing comes on the call itself."""
        assert [message async for message in self.service.Decode(request(call, max_tokens), context())] == []

    def responses(self, call: int) -> list[wire.DecodeResponse]:
        unread = Unread()
        for row in self.rows:
            if row[0] == call:
                unread.put(row)
        taken = []
        while (response := unread.take()) is not None:
            taken.append(response)
        return taken


@pytest.fixture(autouse=True)
async def nothing_runs_on() -> AsyncIterator[None]:
    yield
    running = asyncio.all_tasks() - {asyncio.current_task()}
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def opened(engine: FakeEngine | None = None) -> Worker:
    worker = Worker(engine or FakeEngine())
    assert not (await worker.read()).calls
    return worker


async def read_to_the_end(worker: Worker, calls: int) -> None:
    while sum(row[3] is not None and row[3].HasField("end") for row in worker.rows) < calls:
        await worker.read()


async def test_many_calls_share_messages_and_each_has_its_whole_answer() -> None:
    worker = await opened()

    async with asyncio.TaskGroup() as running:
        for call in range(1, 33):
            running.create_task(worker.decode(call))
        await read_to_the_end(worker, 32)

    assert len(worker.messages) < 32, "a message for each step, not one for each call"
    for call in range(1, 33):
        first, *_, last = told = worker.responses(call)
        assert first.HasField("started")
        assert last.end.completion_tokens == 6
        text = "".join(response.delta.text + response.end.delta.text for response in told)
        assert text == expected_text(PROMPT, SamplingSpec(max_tokens=6))


async def test_a_call_that_names_a_stream_nobody_has_opened_is_refused() -> None:
    service, called = DecodeService(FakeEngine(), registration(), lambda: None), RecordingContext()

    with pytest.raises(Aborted):
        async for _ in service.Decode(request(1), called):  # type: ignore[arg-type]
            pass

    assert (called.code, called.details) == ("UNAVAILABLE", "the router's output stream is not open")


async def test_a_call_ends_with_its_next_row_where_the_router_is_gone() -> None:
    engine = FakeEngine()
    engine.hold_before(3)
    worker = await opened(engine)
    running = asyncio.create_task(worker.decode(1, max_tokens=100))
    await worker.read()

    worker.streaming.cancel()
    await asyncio.gather(worker.streaming, return_exceptions=True)
    engine.resume()

    with pytest.raises(Aborted):
        await running
    assert engine.status().load.running_requests == 0


async def test_a_stream_ends_once_the_worker_drains_and_has_no_call() -> None:
    engine = FakeEngine()
    engine.hold_before(3)
    worker = await opened(engine)
    running = asyncio.create_task(worker.decode(1))
    await worker.read()

    worker.service.start_draining(None)
    engine.resume()
    await read_to_the_end(worker, 1)
    await running

    await worker.streaming


async def test_a_draining_worker_is_not_idle_before_its_routers_have_taken_everything() -> None:
    worker = await opened()
    running = asyncio.create_task(worker.decode(1))
    await read_to_the_end(worker, 1)
    await running
    worker.service.start_draining(None)
    assert not worker.service.is_idle(), "nobody has said that the last rows were taken"

    last = await worker.read(takes=False)
    await asyncio.sleep(0)
    assert last.acknowledge and not last.calls, "few rows were not asked for before"
    assert not worker.service.is_idle()
    assert not worker.streaming.done(), "gRPC would drop what the router has not read"

    worker.router.requests.put_nowait(wire.StreamOutputsRequest())
    await worker.streaming
    assert worker.service.is_idle()


async def test_a_stream_that_is_opened_at_a_drained_worker_ends_at_once() -> None:
    service = DecodeService(FakeEngine(), registration(), lambda: None)
    service.start_draining(None)

    await service.StreamOutputs(iter(()), Router())  # type: ignore[arg-type]


async def test_a_router_that_says_no_more_is_gone() -> None:
    engine = FakeEngine()
    engine.hold_before(3)
    worker = await opened(engine)
    running = asyncio.create_task(worker.decode(1, max_tokens=100))
    await worker.read()

    worker.router.requests.put_nowait(grpc.aio.EOF)  # type: ignore[attr-defined]
    await asyncio.sleep(0)
    engine.resume()

    with pytest.raises(Aborted):
        await running
    await worker.streaming


async def test_an_idle_stream_ends_as_the_worker_begins_to_drain() -> None:
    worker = await opened()
    worker.service.start_draining(None)

    await worker.streaming


@pytest.mark.parametrize("stream_id", ["", STREAM])
def test_a_stream_has_a_name_that_no_other_one_has(stream_id: str) -> None:
    streams = OutputStreams()
    with streams.opened(STREAM), pytest.raises(InvalidInputError, match="stream_id"), streams.opened(stream_id):
        pass
    assert len(streams) == 0


def test_nothing_is_put_into_a_stream_that_nobody_reads() -> None:
    streams = OutputStreams()
    with streams.opened(STREAM) as stream:
        stream.put_tokens(1, (5,), "a")

    with pytest.raises(UnavailableError):
        stream.put_tokens(1, (5,), "a")
    with pytest.raises(UnavailableError):
        streams.of(STREAM)


async def test_what_a_slow_router_has_not_taken_waits_here_and_is_one_message() -> None:
    tokens = 4 * ROWS_TO_ACKNOWLEDGE
    worker = await opened()
    await worker.decode(1, max_tokens=tokens)
    while sum(message.acknowledge for message in worker.messages) < MOST_ON_THEIR_WAY:
        await worker.read(takes=False)
    await asyncio.sleep(0)
    assert worker.router.messages.empty()
    before = len(worker.messages)

    worker.router.requests.put_nowait(wire.StreamOutputsRequest())
    await read_to_the_end(worker, 1)

    assert len(worker.messages) == before + 1
    assert worker.responses(1)[-1].end.completion_tokens == tokens


async def test_a_router_is_not_asked_for_each_token_of_a_single_answer() -> None:
    worker = await opened()
    running = asyncio.create_task(worker.decode(1, max_tokens=10 * ROWS_TO_ACKNOWLEDGE))
    await read_to_the_end(worker, 1)
    await running

    assert sum(message.acknowledge for message in worker.messages) <= 11
