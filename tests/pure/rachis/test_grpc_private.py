"""A write to a call that is over returns, and leaves it to reading to tell why."""

import asyncio
from collections.abc import Callable

import grpc
from google.protobuf.message import Message
from grpc._cython import cygrpc
from grpc.aio import _call
from rachis import grpc_private
from rachis.v1 import router_pb2 as api


class Call:
    """As grpcio has it. breaks: the transport is gone, and nobody knows yet why."""

    def __init__(self, *, breaks: bool = False) -> None:
        self._metadata_sent = asyncio.Event()
        self._cython_call = self
        self.breaks = breaks
        self.window = asyncio.Event()
        self.window.set()
        self.is_cancelled = False
        self.is_over = False
        self.sent: list[bytes] = []
        self._callbacks: list[Callable[[Call], None]] = []

    def done(self) -> bool:
        return self.is_over

    def add_done_callback(self, callback: "Callable[[Call], None]") -> None:
        self._callbacks.append(callback)

    def end(self) -> None:
        self.is_over = True
        for each in self._callbacks:
            each(self)

    def begin(self) -> None:
        self._metadata_sent.set()

    def cancel(self) -> None:
        self.is_cancelled = True

    async def send_serialized_message(self, message: bytes) -> None:
        await self.window.wait()
        if self.breaks:
            raise cygrpc.InternalError("execute_batch")
        self.sent.append(message)


MESSAGE = api.StreamGenerateRequest()


async def test_it_waits_until_the_call_has_begun() -> None:
    call = Call()
    writing = asyncio.ensure_future(grpc_private.write(call, MESSAGE))
    await asyncio.sleep(0)
    assert not call.sent
    call.begin()
    assert await writing and call.sent == [MESSAGE.SerializeToString()]


async def test_a_call_that_is_over_before_it_has_begun_is_waited_for_no_more() -> None:
    call = Call()
    writing = asyncio.ensure_future(grpc_private.write(call, MESSAGE))
    await asyncio.sleep(0)
    call.end()
    assert not await writing
    assert not await grpc_private.write(call, MESSAGE)
    assert not call.sent


async def test_a_write_that_is_given_up_while_the_window_is_full_ends_the_call() -> None:
    call = Call()
    call.begin()
    call.window.clear()
    writing = asyncio.ensure_future(grpc_private.write(call, MESSAGE))
    await asyncio.sleep(0)
    writing.cancel()
    await asyncio.wait({writing})
    assert writing.cancelled() and call.is_cancelled


async def test_a_write_that_fails_is_no_verdict() -> None:
    call = Call(breaks=True)
    call.begin()
    assert not await grpc_private.write(call, MESSAGE)


class Intercepted:
    """What gRPC gives behind an interceptor."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.sent: list[Message] = []

    async def write(self, message: Message) -> None:
        if self.error is not None:
            raise self.error
        self.sent.append(message)


def test_grpcio_has_the_names_that_are_touched() -> None:
    """Another version may have others: a call would be written to as anybody would, and hide why it ended."""
    assert {"_cython_call"} <= set(_call.Call.__init__.__code__.co_names)
    assert {"_metadata_sent"} <= set(_call.StreamStreamCall._init_stream_request_mixin.__code__.co_names)
    assert hasattr(cygrpc._AioCall, "send_serialized_message") and hasattr(cygrpc, "InternalError")


async def test_a_call_behind_an_interceptor_is_written_to_as_anybody_would() -> None:
    call = Intercepted()
    assert await grpc_private.write(call, MESSAGE) and call.sent == [MESSAGE]
    lost = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "", None)
    for error in (asyncio.InvalidStateError(), lost):
        assert not await grpc_private.write(Intercepted(error), MESSAGE)
