"""Every RPC of router and workers, called with random messages and with bytes that are none.

Whatever comes, the call ends by itself, with a status that blames the right side, and nothing of it is left.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from random import Random
from typing import Any

import grpc
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError
from rachis.v1 import admin_pb2, router_pb2, worker_pb2, worker_pb2_grpc

from tests.examples import seeds
from tests.fakes.answers import text_of, whole_text
from tests.fakes.cluster import DECODE, PREFILL, Cluster, running_cluster, until
from tests.fakes.random_messages import damaged, message

# A defect of ours, or a call that did not end.
FORBIDDEN = {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.DEADLINE_EXCEEDED}
TIMEOUT_S = 60.0
_MOST_RESPONSES = 2000
# They go on until the client leaves: here after the first response.
_ENDLESS = {"WatchOverview"}
# What gRPC's own client says, in place of the status, where it was writing to a call that had ended.
_WRITE_FAILED = "Internal error from Core"


def methods() -> Iterator[Any]:
    for file in (router_pb2, admin_pb2, worker_pb2):
        for service in file.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                yield pytest.param(method, id=f"{service.name}-{method.name}")


def requests(rng: Random, method: MethodDescriptor) -> list[bytes]:
    count = rng.choice((0, 1, 2, 6)) if method.client_streaming else 1
    return [damaged(rng, message(rng, method.input_type).SerializeToString()) for _ in range(count)]


def parses(method: MethodDescriptor, data: bytes) -> bool:
    try:
        message_factory.GetMessageClass(method.input_type).FromString(data)
    except DecodeError:
        return False
    return True


async def _sent(data: Sequence[bytes]) -> AsyncIterator[bytes]:
    for each in data:
        yield each


async def called(channel: grpc.aio.Channel, method: MethodDescriptor, data: Sequence[bytes], leaves: bool) -> Any:
    """The status that it ended with. leaves: its client cancels it before it has heard anything."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    as_they_are: Any = channel.stream_stream(path, bytes, bytes)
    call = as_they_are(_sent(data), timeout=TIMEOUT_S)
    if leaves:
        await asyncio.sleep(0)
        call.cancel()
    # A client that has left gets CancelledError, whatever it does.
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
        for _ in range(1 if method.name in _ENDLESS else _MOST_RESPONSES):
            if await call.read() is grpc.aio.EOF:  # type: ignore[attr-defined]  # missing in grpc-stubs
                break
        else:
            call.cancel()
    status = await call.code()
    is_own = status is grpc.StatusCode.INTERNAL and await call.details() == _WRITE_FAILED
    return grpc.StatusCode.CANCELLED if is_own else status


@pytest.mark.parametrize("method", methods())
async def test_no_message_ends_in_a_defect_or_never(method: MethodDescriptor) -> None:
    is_workers = method.containing_service.name == "WorkerService"
    async with running_cluster() as cluster:
        workers = [await cluster.add(pool) for pool in (PREFILL, DECODE)]
        addresses = [worker.record.address for worker in workers] if is_workers else [cluster.router.address]
        for address in addresses:
            async with grpc.aio.insecure_channel(address) as channel:
                for seed in seeds(300, few=40):
                    rng = Random(f"{method.full_name} {seed}")
                    data = requests(rng, method)
                    status = await called(channel, method, data, rng.random() < 1 / 6)
                    # Workers hear routers alone: nothing blames a client there for what does not parse.
                    is_told = not is_workers or all(parses(method, each) for each in data)
                    assert status not in (FORBIDDEN if is_told else {grpc.StatusCode.DEADLINE_EXCEEDED}), f"seed {seed}"
        await serves_as_before(cluster)


async def serves_as_before(cluster: Cluster) -> None:
    for worker in cluster.workers:
        async with grpc.aio.insecure_channel(worker.record.address) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            await stub.SetDraining(worker_pb2.SetDrainingRequest(draining=False))
        # What happened to be a good prefill has left a lease that nobody pulls.
        for job in worker.engine.jobs:
            await worker.engine.release(job.request_id)
    await until(lambda: all(cluster.router.membership.usable(pool) for pool in (PREFILL, DECODE)))
    # Calls that were refused before they became requests are counted nowhere.
    await until(lambda: cluster.parts.admission.in_flight == 0)
    cluster.calls = sum(cluster.outcomes.values())
    assert text_of(await cluster.generate()) == whole_text()
