"""The client's side: calls and channels, as the generated stubs use them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable
from typing import Any

import grpc

from fault_sim.local_grpc.addresses import Addresses
from fault_sim.local_grpc.wire import Metadata, Status, Wire
from fault_sim.network import Link, Network

# A request that arrives twice does so within this time.
_REPEAT_WITHIN_S = 2.0
_EOF = grpc.aio.EOF  # type: ignore[attr-defined]  # missing in grpc-stubs


class LocalCall:
    """The client's end, of any kind of call."""

    def __init__(self, wire: Wire, serialize: Callable[[Any], bytes], parse: Callable[[bytes], Any]) -> None:
        self._wire = wire
        self._serialize = serialize
        self._parse = parse
        self._is_cancelled = False
        self._done_writing = False
        self._feeding: asyncio.Task[None] | None = None
        loop = asyncio.get_running_loop()
        self._deadline_s = None if wire.timeout_s is None else loop.time() + wire.timeout_s
        if self._deadline_s is not None:
            timer = loop.call_at(self._deadline_s, self._expire)
            wire.on_status.append(timer.cancel)
        wire.on_status.append(self._stop_feeding)

    # Requests.

    def send_only(self, request: Any) -> None:
        self._send(request)
        self._half_close()

    def feed(self, requests: AsyncIterator[Any] | Iterable[Any]) -> None:
        self._feeding = asyncio.create_task(self._feed(requests))

    async def write(self, request: Any) -> None:
        if self.done():
            raise asyncio.InvalidStateError("RPC already finished.")
        if self._done_writing:
            raise asyncio.InvalidStateError("RPC is half closed after calling `done_writing`")
        await self._until(self._wire.requests.room(self.done))
        if self.done():
            await self._raise_for_status()
        self._send(request)

    async def done_writing(self) -> None:
        if not self.done() and not self._done_writing:
            self._half_close()

    # Responses.

    async def read(self) -> Any:
        data = await self._until(self._wire.responses.next(lambda: False))
        if data is None:
            await self._raise_for_status()
            return _EOF
        return self._parse(data)

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (response := await self.read()) is not _EOF:
            yield response

    def __await__(self) -> Generator[Any, None, Any]:
        return self._only_response().__await__()

    # What becomes of it.

    def cancel(self) -> bool:
        if self.done():
            return False
        self._is_cancelled = True
        self._give_up(Status(grpc.StatusCode.CANCELLED, "Locally cancelled by application!"))
        return True

    def cancelled(self) -> bool:
        return self._is_cancelled

    def done(self) -> bool:
        return self._wire.status is not None

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        if self.done():
            callback(self)
        else:
            self._wire.on_status.append(lambda: callback(self))

    def time_remaining(self) -> float | None:
        if self._deadline_s is None:
            return None
        return max(0.0, self._deadline_s - asyncio.get_running_loop().time())

    async def code(self) -> grpc.StatusCode:
        return (await self._status()).code

    async def details(self) -> str:
        return (await self._status()).details

    async def initial_metadata(self) -> grpc.aio.Metadata:
        return grpc.aio.Metadata()

    async def trailing_metadata(self) -> grpc.aio.Metadata:
        return grpc.aio.Metadata(*(await self._status()).trailing)

    def _send(self, request: Any) -> None:
        self._wire.may_break()
        self._wire.requests.send(self._serialize(request))

    def _half_close(self) -> None:
        self._done_writing = True
        self._wire.requests.finish()

    async def _feed(self, requests: AsyncIterator[Any] | Iterable[Any]) -> None:
        if isinstance(requests, AsyncIterator):
            async for request in requests:
                await self.write(request)
        else:
            for request in requests:
                await self.write(request)
        await self.done_writing()

    def _stop_feeding(self) -> None:
        if self._feeding is not None:
            self._feeding.cancel()

    async def _only_response(self) -> Any:
        data = await self._until(self._wire.responses.next(lambda: False))
        await self._until(self._status())
        await self._raise_for_status()
        if data is None:
            raise AssertionError("a call that is OK has a response")
        return self._parse(data)

    async def _status(self) -> Status:
        if self._wire.status is None:
            ended = asyncio.Event()
            self._wire.on_status.append(ended.set)
            await ended.wait()
        assert self._wire.status is not None
        return self._wire.status

    async def _until(self, waiting: Awaitable[Any]) -> Any:
        """A cancelled wait cancels the call."""
        try:
            return await waiting
        except asyncio.CancelledError:
            self.cancel()
            raise

    async def _raise_for_status(self) -> None:
        if self._is_cancelled:
            raise asyncio.CancelledError
        status = await self._status()
        if status.code is not grpc.StatusCode.OK:
            trailing = grpc.aio.Metadata(*status.trailing)
            raise grpc.aio.AioRpcError(status.code, grpc.aio.Metadata(), trailing, status.details, None)

    def _expire(self) -> None:
        self._give_up(Status(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))

    def break_off(self) -> None:
        self._give_up(Status(grpc.StatusCode.UNAVAILABLE, "the process is gone"))

    def _give_up(self, status: Status) -> None:
        wire = self._wire
        wire.responses.arrived.clear()
        wire.requests.lane.send(wire.server_lost)
        wire.end(status)


class LocalChannel:
    """To one address, from one host."""

    def __init__(self, network: Network, addresses: Addresses, host: str, address: str) -> None:
        self.network = network
        self._addresses = addresses
        self._host = host
        self._address = address
        self._calls: dict[LocalCall, None] = {}
        self._is_gone = False

    def unary_unary(self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        return self._multicallable(method, request_serializer, response_deserializer, streams=False, is_unary=True)

    def unary_stream(self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        return self._multicallable(method, request_serializer, response_deserializer, streams=False)

    def stream_unary(self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        return self._multicallable(method, request_serializer, response_deserializer, streams=True)

    def stream_stream(self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        return self._multicallable(method, request_serializer, response_deserializer, streams=True)

    async def close(self, grace: float | None = None) -> None:
        """Cancels the calls that still run after so many seconds."""
        deadline_s = asyncio.get_running_loop().time() + (grace or 0.0)
        while self._calls and asyncio.get_running_loop().time() < deadline_s:
            call = next(iter(self._calls))
            try:
                async with asyncio.timeout_at(deadline_s):
                    await call.code()
            except TimeoutError:
                break
        for call in list(self._calls):
            call.cancel()

    def kill(self) -> None:
        """Its process is gone: the calls break, and those that it still makes reach nobody."""
        self._is_gone = True
        for call in list(self._calls):
            call.break_off()

    def _multicallable(self, method: str, serialize: Any, parse: Any, *, streams: bool, is_unary: bool = False) -> Any:
        def start(requests: Any = None, *, timeout: float | None = None, metadata: Metadata = (), **_: Any) -> Any:
            link = self.network.link(self._host, self._addresses.host_of(self._address))
            wire = Wire(link, method, timeout, metadata or ())
            call = LocalCall(wire, serialize, parse)
            if self._is_gone:
                call.break_off()
                return call
            self._calls[call] = None
            wire.on_status.append(lambda: self._calls.pop(call, None))
            wire.requests.lane.send(lambda: self._addresses.arrive(self._address, wire))
            if not streams:
                call.send_only(requests)
                if is_unary and link.repeats and link.rng.random() < link.repeats:
                    self._repeat(link, wire, serialize(requests))
            elif requests is not None:
                call.feed(requests)
            return call

        return start

    def _repeat(self, link: Link, wire: Wire, request: bytes) -> None:
        """The same request once more, a little later; the second answer reaches no client."""

        def again() -> None:
            copy = Wire(link, wire.method, wire.timeout_s, wire.metadata)
            copy.requests.lane.send(lambda: self._addresses.arrive(self._address, copy))
            copy.requests.send(request)
            copy.requests.finish()

        asyncio.get_running_loop().call_later(link.rng.random() * _REPEAT_WITHIN_S, again)
