"""A server whose handlers a test writes, and its client, over real gRPC and over the simulation's transport."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import grpc
import pytest
from rachis.conventions import channel_options
from rachis.v1 import worker_pb2 as wire
from rachis.v1 import worker_pb2_grpc

from cluster_wire.calls import Context
from control_plane.intake.malformed_input import MalformedInputInterceptor
from fault_sim.local_grpc.transport import LocalTransport
from fault_sim.network import Network

WAIT_S = 60.0


class Servicer(worker_pb2_grpc.WorkerServiceServicer):
    """Each call does what the test has put into `on_...`; `cancelled` is set when one is cancelled."""

    def __init__(self) -> None:
        self.cancelled = asyncio.Event()
        self.begun = asyncio.Event()
        self.context: Any = None
        self.on_unary: Callable[[Any, Any], Any] = self._nothing
        self.on_stream: Callable[[Any, Any], AsyncIterator[Any]]
        self.on_session: Callable[[Any], Any] = self._nothing

    async def ReleaseHandoff(self, request: Any, context: Context) -> Any:  # noqa: N802
        async with self._noted(context):
            return await self.on_unary(request, context)

    async def Decode(self, request: Any, context: Context) -> AsyncIterator[Any]:  # noqa: N802
        async with self._noted(context):
            async for message in self.on_stream(request, context):
                yield message

    async def PrefillSession(self, request_iterator: Any, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        async with self._noted(context):
            await self.on_session(context)

    async def _nothing(self, *_: Any) -> None:
        await asyncio.Event().wait()

    @asynccontextmanager
    async def _noted(self, context: Context) -> AsyncIterator[None]:
        self.context = context
        self.begun.set()
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.set()
            raise


class Service:
    """A server with a servicer, and a stub of a client."""

    def __init__(self, servicer: Servicer, server: Any, channel: Any) -> None:
        self.servicer = servicer
        self.server = server
        self.channel = channel
        self.stub: Any = worker_pb2_grpc.WorkerServiceStub(channel)

    def release(self, lease_id: str = "x", **options: Any) -> Any:
        return self.stub.ReleaseHandoff(wire.ReleaseHandoffRequest(lease_id=lease_id), **options)

    def decode(self, **options: Any) -> Any:
        return self.stub.Decode(wire.DecodeRequest(request_id="x"), **options)


@asynccontextmanager
async def real() -> AsyncIterator[Service]:
    servicer = Servicer()  # type: ignore[abstract]  # the other calls are not asked for
    options = channel_options(64 << 20)
    server = grpc.aio.server(interceptors=[MalformedInputInterceptor(16 << 20)], options=options)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options)
    try:
        yield Service(servicer, server, channel)
    finally:
        await channel.close(None)
        await server.stop(None)


@asynccontextmanager
async def local() -> AsyncIterator[Service]:
    servicer = Servicer()  # type: ignore[abstract]  # the other calls are not asked for
    transport = LocalTransport(Network(Random(0)))
    server: Any = transport.server("worker", [MalformedInputInterceptor(16 << 20)])
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("worker:0")
    await server.start()
    channel = transport.channel("client", f"worker:{port}")
    try:
        yield Service(servicer, server, channel)
    finally:
        await channel.close(None)
        await server.stop(None)


async def error_of(awaitable: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await awaitable
    return caught.value


async def happens(event: asyncio.Event) -> None:
    async with asyncio.timeout(WAIT_S):
        await event.wait()


def delta(text: str) -> wire.DecodeResponse:
    message = wire.DecodeResponse()
    message.delta.text = text
    return message
