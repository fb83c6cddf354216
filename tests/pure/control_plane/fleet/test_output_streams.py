"""What a decode call gets through its worker's output stream, and what it ends with when either of the two ends."""

import asyncio

import grpc
import pytest
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire

from cluster_core.errors import DeadlineError
from cluster_core.ids import WorkerId
from cluster_wire.step_outputs import StepRows
from control_plane.fleet.output_streams import OutputStreams
from control_plane.fleet.worker_client import (
    DecodeCall,
    WorkerDiedError,
    WorkerDrainingError,
    WorkerLostError,
    WorkerStalledError,
    WorkerUnreachableError,
)
from control_plane.model.worker_snapshot import WorkerSnapshot
from tests import simulated_time
from tests.fakes.grpc_call import Call

WORKER = WorkerSnapshot(WorkerId("decode-0"), 1, wire.POOL_DECODE, "a:1")
STARTED = wire.DecodeResponse(started=wire.DecodeStarted(cached_tokens=2))
END = wire.DecodeResponse(end=wire.DecodeEnd(completion_tokens=3))


def broken(details: str, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details, None)


class World:
    """One worker, the streams that were opened to it, and the calls."""

    def __init__(self) -> None:
        self.streams = OutputStreams()
        self.opened: list[Call] = []
        self.requests: list[wire.DecodeRequest] = []
        self.calls: list[Call] = []
        self.timeouts: list[float] = []

    def decode(self, timeout_s: float = 600.0) -> DecodeCall:
        stream = self.streams.of(WORKER.address, WORKER.generation, self._open)
        return DecodeCall(WORKER, stream, wire.DecodeRequest(), timeout_s, lambda: self._begin)

    def send(self, *rows: tuple[int, wire.DecodeResponse | str], stream: int = 0, acknowledge: bool = False) -> None:
        """One message; a text is a token of it."""
        columns = StepRows()
        for call, row in rows:
            if isinstance(row, str):
                columns.put_tokens(call, (ord(row),), row)
            else:
                columns.put(call, row)
        message = columns.take()
        message.acknowledge = acknowledge
        self.opened[stream].send(message)

    def _open(self) -> Call:
        self.opened.append(Call())
        return self.opened[-1]

    def _begin(self, request: wire.DecodeRequest, timeout: float) -> Call:
        self.requests.append(request)
        self.timeouts.append(timeout)
        self.calls.append(Call())
        return self.calls[-1]


class Reading:
    """What one call has got; `ended` once it has."""

    def __init__(self, call: DecodeCall) -> None:
        self.call = call
        self.responses: list[wire.DecodeResponse] = []
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()
        self.ended = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for response in self.call.messages():
            self.responses.append(response)
            await self.may_go_on.wait()

    @property
    def kinds(self) -> list[str | None]:
        return [response.WhichOneof("event") for response in self.responses]


async def settled() -> None:
    """Whatever can go on now has."""
    for _ in range(10):
        await asyncio.sleep(0)


async def begun(world: World, calls: int = 1) -> list[Reading]:
    readings = [Reading(world.decode(60.0)) for _ in range(calls)]
    await settled()
    world.send()
    await settled()
    return readings


async def test_calls_begin_once_the_stream_is_open_and_share_it() -> None:
    world = World()
    readings = [Reading(world.decode()) for _ in range(3)]
    await settled()
    assert (len(world.opened), world.requests) == (1, [])

    world.send()
    await settled()

    assert [request.output_call for request in world.requests] == [1, 2, 3]
    assert len({request.output_stream for request in world.requests}) == 1
    world.send((1, STARTED), (2, STARTED), (3, STARTED), (2, "b"), (1, "a"))
    world.send((1, END), (2, END), (3, END), (3, "x"))
    await asyncio.gather(*(reading.ended for reading in readings))
    assert [reading.kinds for reading in readings] == [["started", "delta", "end"]] * 2 + [["started", "end"]]
    assert [reading.responses[1].delta.text for reading in readings[:2]] == ["a", "b"]


async def test_deltas_that_come_while_the_client_takes_none_are_one() -> None:
    world = World()
    (reading,) = await begun(world)
    world.send((1, STARTED), (1, "a"))
    await settled()
    reading.may_go_on.clear()
    for letter in "bcd":
        world.send((1, letter))
        await settled()
    world.send((1, "e"), (1, END))
    await settled()

    reading.may_go_on.set()
    await reading.ended

    deltas = [(list(each.delta.token_ids), each.delta.text) for each in reading.responses if each.HasField("delta")]
    assert deltas == [([97], "a"), ([98], "b"), ([99, 100, 101], "cde")]


async def test_the_worker_hears_what_was_taken_where_it_asks() -> None:
    world = World()
    await begun(world)
    for letter in "abcdef":
        world.send((1, letter), acknowledge=letter in "ce")
    await settled()

    assert [bool(each.stream_id) for each in world.opened[0].written] == [True, False, False]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (broken("Socket closed"), WorkerDiedError),
        (broken("the worker leaves"), WorkerLostError),
        (None, WorkerDrainingError),
        (ValueError("columns that do not fit"), WorkerLostError),
        (broken("too large", grpc.StatusCode.RESOURCE_EXHAUSTED), WorkerLostError),
        (broken("a defect", grpc.StatusCode.INTERNAL), WorkerLostError),
    ],
    ids=["died", "lost", "drains", "nonsense", "too large", "defect"],
)
async def test_a_stream_that_ends_ends_its_calls_and_the_next_one_opens_another(
    error: Exception | None, kind: type[Exception]
) -> None:
    world = World()
    readings = await begun(world, 2)
    world.send((1, STARTED), (1, "a"))
    world.opened[0].end(error)

    for reading in readings:
        with pytest.raises(kind, match="decode-0"):
            await reading.ended
    assert readings[0].kinds == ["started", "delta"], "what had come is not lost"
    assert all(call.is_cancelled for call in world.calls)

    await settled()
    again = Reading(world.decode())
    await settled()
    world.send(stream=1)
    world.send((1, END), stream=1)
    await again.ended
    assert world.requests[-1].output_stream != world.requests[0].output_stream


async def test_a_call_that_fails_says_so_after_what_had_come() -> None:
    world = World()
    (reading,) = await begun(world)
    world.send((1, STARTED))
    await settled()
    world.calls[0].end(broken("the engine died"))

    with pytest.raises(WorkerDiedError):
        await reading.ended
    assert reading.kinds == ["started"]
    assert not world.opened[0].is_cancelled, "it is only this call"


async def test_a_call_may_end_before_the_rest_of_its_answer_has_come() -> None:
    world = World()
    (reading,) = await begun(world)
    world.calls[0].end()
    await settled()
    world.send((1, STARTED))
    await settled()
    world.send((1, END))

    await reading.ended
    assert reading.kinds == ["started", "end"]


def test_an_answer_whose_rest_never_comes_is_lost() -> None:
    async def play() -> None:
        world = World()
        (reading,) = await begun(world)
        world.calls[0].end()
        await reading.ended

    with pytest.raises(WorkerLostError, match="ended the call early"):
        simulated_time.run(play())


def test_a_stream_that_does_not_open_is_waited_for_as_long_as_the_request_may_take() -> None:
    async def play() -> float:
        world, loop = World(), asyncio.get_running_loop()
        began_s = loop.time()
        with pytest.raises(DeadlineError):
            await Reading(world.decode(60.0)).ended
        assert not world.calls
        await world.streams.close()
        return loop.time() - began_s

    assert simulated_time.run(play()) == 60.0


def test_the_time_that_opening_took_is_no_more_the_calls() -> None:
    async def play() -> list[float]:
        world = World()
        reading = Reading(world.decode(60.0))
        await asyncio.sleep(25.0)
        world.send()
        await settled()
        reading.call.leave(WorkerStalledError("it hangs"))
        await asyncio.gather(reading.ended, return_exceptions=True)
        await world.streams.close()
        return world.timeouts

    assert simulated_time.run(play()) == [35.0]


def test_an_answer_behind_many_rows_of_others_is_waited_for() -> None:
    async def play() -> list[str | None]:
        world = World()
        (reading,) = await begun(world)
        world.calls[0].end()
        for _ in range(5):
            await asyncio.sleep(8.0)
            world.send((99, "x"))
        world.send((1, END))
        await reading.ended
        await world.streams.close()
        return reading.kinds

    assert simulated_time.run(play()) == ["end"]


def test_behind_rows_of_others_that_never_end_an_answer_is_waited_for_until_its_deadline() -> None:
    async def play() -> float:
        world, loop = World(), asyncio.get_running_loop()
        began_s = loop.time()
        (reading,) = await begun(world)
        world.calls[0].end()
        while not reading.ended.done():
            await asyncio.sleep(8.0)
            world.send((99, "x"))
        with pytest.raises(DeadlineError):
            await reading.ended
        await world.streams.close()
        return loop.time() - began_s

    assert simulated_time.run(play()) == 64.0


async def test_a_stream_whose_worker_has_left_before_it_is_read_is_closed() -> None:
    world = World()
    world.decode()
    world.streams.keep_only(set())
    await settled()
    assert world.opened[0].is_cancelled, "nobody reads the call"
    await world.streams.close()


async def test_a_worker_that_dies_as_the_stream_opens_is_not_blamed_on_the_call() -> None:
    world = World()
    reading = Reading(world.decode())
    await settled()
    world.opened[0].end(broken("Socket closed"))

    with pytest.raises(WorkerUnreachableError, match="decode-0: Socket closed"):
        await reading.ended


async def test_a_worker_that_comes_back_to_the_registry_gets_a_stream_of_its_new_channel() -> None:
    world = World()
    (reading,) = await begun(world)
    world.streams.keep_only(set())
    later = Reading(world.decode())
    await settled()
    assert len(world.opened) == 2
    world.send(stream=1)
    await settled()

    world.send((1, END))
    world.send((1, END), stream=1)
    await asyncio.gather(reading.ended, later.ended)
    assert [each.is_cancelled for each in world.opened] == [True, False]
    await world.streams.close()


@pytest.mark.parametrize("is_open", [False, True])
async def test_a_call_is_left_at_any_time(is_open: bool) -> None:
    world = World()
    reading = Reading(world.decode())
    await settled()
    if is_open:
        world.send()
        await settled()

    reading.call.leave(WorkerStalledError("it hangs"))

    with pytest.raises(WorkerStalledError):
        await reading.ended
    assert [call.is_cancelled for call in world.calls] == [True] * is_open
    await world.streams.close()


async def test_the_stream_of_a_worker_that_left_closes_after_its_last_call() -> None:
    world = World()
    (reading,) = await begun(world)
    world.streams.keep_only(set())
    await settled()
    assert not world.opened[0].is_cancelled

    world.send((1, END))
    await reading.ended

    assert world.opened[0].is_cancelled


async def test_prompt_and_log_probabilities_come_as_they_were_sent() -> None:
    world = World()
    (reading,) = await begun(world)
    row = generation.PositionLogprobs(sampled=generation.TokenLogprob(token_id=5, logprob=-0.5, rank=1))
    delta = wire.DecodeResponse(delta=generation.CompletionDelta(token_ids=[5], text="a", logprobs=[row]))
    world.send((1, delta), (1, delta), (1, END))

    await reading.ended
    assert reading.responses == [delta, delta, END]
