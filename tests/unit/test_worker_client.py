"""The router's calls to a worker: what is closed early is cancelled there, what does not answer counts as lost."""

from collections.abc import AsyncIterator
from contextlib import aclosing

import grpc
import pytest
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire
from rachis.v1 import worker_pb2_grpc

from cluster_core.errors import DeadlineError, InvalidInputError
from cluster_core.ids import WorkerId
from control_plane.membership import WorkerSnapshot
from control_plane.worker_client import WorkerClient, WorkerLostError
from decode_worker.service import DecodeService
from tests.fakes.cluster import until
from tests.fakes.engine import FakeEngine


class Called:
    """A client and the one decode worker that it calls."""

    def __init__(self, address: str, engine: FakeEngine, server: grpc.aio.Server) -> None:
        self.client = WorkerClient(1 << 20)
        self.engine = engine
        self.server = server
        self.worker = WorkerSnapshot(WorkerId("decode-0"), 1, wire.POOL_DECODE, address, 0, 0, 64)

    def decode(self, name: str = "r#1", timeout_s: float = 5.0) -> AsyncIterator[wire.DecodeResponse]:
        request = wire.DecodeRequest(
            request_id=name, generation=1, token_ids=[1, 2], sampling=generation.SamplingParams(max_tokens=1000)
        )
        return self.client.decode(self.worker, request, timeout_s)


@pytest.fixture
async def called() -> AsyncIterator[Called]:
    engine = FakeEngine()
    server = grpc.aio.server()
    record = wire.WorkerRegistration(worker_id="decode-0", generation=1, state=wire.WORKER_STATE_READY)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(DecodeService(engine, record, lambda: None), server)
    called = Called(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", engine, server)
    await server.start()
    yield called
    await called.client.close()
    await server.stop(None)


async def test_a_decode_whose_iterator_is_closed_is_cancelled_at_the_worker(called: Called) -> None:
    called.engine.hold_before(3)
    stream = called.decode()
    assert (await anext(stream)).HasField("started")
    await called.engine.held.wait()
    assert called.engine.status().load.running_requests == 1

    await stream.aclose()  # type: ignore[attr-defined]

    await until(lambda: called.engine.status().load.running_requests == 0)


async def test_a_worker_that_is_gone_counts_as_lost_under_its_name(called: Called) -> None:
    await called.server.stop(None)

    with pytest.raises(WorkerLostError, match=r"^worker decode-0: "):
        await anext(called.decode())


async def test_a_worker_of_another_pool_does_not_serve_the_call(called: Called) -> None:
    with pytest.raises(Exception, match="worker decode-0") as caught:
        await called.client.prefill(called.worker, wire.PrefillRequest(generation=1), 5.0)

    assert not isinstance(caught.value, WorkerLostError)


async def test_a_call_beyond_its_time_is_a_deadline_not_a_lost_worker(called: Called) -> None:
    called.engine.hold_before(0)

    with pytest.raises(DeadlineError):
        await anext(called.decode(timeout_s=0.05))

    await until(lambda: called.engine.status().load.running_requests == 0)


async def test_what_the_engine_refuses_stays_bad_input(called: Called) -> None:
    called.engine.hold_before(1)
    async with aclosing(called.decode("same")) as first:  # type: ignore[type-var]
        await anext(first)

        with pytest.raises(InvalidInputError, match="request_id: is already running"):
            await anext(called.decode("same"))


async def test_a_channel_to_a_worker_that_left_is_closed_only_after_its_calls(called: Called) -> None:
    called.engine.hold_before(3)
    async with aclosing(called.decode()) as stream:  # type: ignore[type-var]
        await anext(stream)

        called.client.keep_only(set())
        called.engine.resume()

        messages = [message async for message in stream]
    assert messages[-1].end.completion_tokens == 1000
