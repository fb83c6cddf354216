"""`grpc.aio` in one process: servers and channels that the generated stubs and servicers cannot tell from real ones.

What the project relies on is here, and checked against real gRPC by the same contract tests: all four kinds of calls,
interceptors, deadlines at both ends, cancelling that reaches the server, aborts with details and trailing metadata, a
bounded window in each direction, graceful stops, and calls that break. Messages are serialised and parsed as in truth.

Who ends a call: the server with its status, or the client by cancelling or its deadline, or the link by breaking. The
first that reaches an end counts there.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from cluster_sim.faults.network import Lane, Link, Network

# Bytes on their way and unread in one direction of a call before who writes has to wait.
WINDOW_BYTES = 64 << 10
# A request that arrives twice does so within this time.
_REPEAT_WITHIN_S = 2.0
_NOTICED_WITHIN_S = 20.0
_EOF = grpc.aio.EOF  # type: ignore[attr-defined]  # missing in grpc-stubs

Metadata = Sequence[tuple[str, str | bytes]]
Trace = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class _Status:
    code: grpc.StatusCode
    details: str = ""
    trailing: Metadata = ()


class _Half:
    """One direction of a call: messages that have arrived and were not read, and what is on its way."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.arrived: deque[bytes] = deque()
        self.is_closed = False
        self._unread_bytes = 0
        self._news = asyncio.Event()

    def news(self) -> None:
        self._news.set()

    async def room(self, ended: Callable[[], bool]) -> None:
        while self._unread_bytes >= WINDOW_BYTES and not ended():
            await self._wait()

    def send(self, data: bytes) -> None:
        self._unread_bytes += len(data)
        self.lane.send(lambda: self._arrive(data))

    def finish(self) -> None:
        self.lane.send(self.close)

    def close(self) -> None:
        self.is_closed = True
        self.news()

    async def next(self, ended: Callable[[], bool]) -> bytes | None:
        """None at the end: no more will come, or `ended`."""
        while not self.arrived and not self.is_closed and not ended():
            await self._wait()
        if not self.arrived:
            return None
        data = self.arrived.popleft()
        self._unread_bytes -= len(data)
        self.news()
        return data

    def _arrive(self, data: bytes) -> None:
        self.arrived.append(data)
        self.news()

    async def _wait(self) -> None:
        self._news.clear()
        await self._news.wait()


class _Wire:
    """A call between its two ends, which are told of what reaches them."""

    def __init__(self, link: Link, method: str, timeout_s: float | None, metadata: Metadata) -> None:
        self.link = link
        self.method = method
        self.timeout_s = timeout_s
        self.metadata = metadata
        self.requests = _Half(Lane(link))
        self.responses = _Half(Lane(link))
        # At the client.
        self.status: _Status | None = None
        self.on_status: list[Callable[[], object]] = []
        # At the server.
        self.is_lost = False
        self.on_lost: Callable[[], object] = lambda: None
        link.calls[self] = None

    def client_lost(self, why: str) -> None:
        self.end(_Status(grpc.StatusCode.UNAVAILABLE, why))

    def server_lost(self) -> None:
        """The client is gone, as far as the server can tell."""
        if not self.is_lost:
            self.is_lost = True
            self.responses.lane.close()
            self.requests.close()
            self.responses.news()
            self._leave_link()
            self.on_lost()

    def end(self, status: _Status) -> None:
        """The client's view of the call is final."""
        if self.status is None:
            self.status = status
            self.responses.close()
            self.requests.news()
            self._leave_link()
            for callback in self.on_status:
                callback()

    def answer(self, status: _Status) -> None:
        """The server has ended the call."""
        self.responses.lane.send(lambda: self.end(status))
        self.responses.lane.close()
        # Whatever the client still sends is not read.
        self.is_lost = True
        self.requests.close()
        self._leave_link()

    def _leave_link(self) -> None:
        """Once both ends are done with it."""
        if self.is_lost and self.status is not None:
            self.link.calls.pop(self, None)

    def may_break(self) -> None:
        """Called with each message that is sent."""
        if self.link.loss and self.link.rng.random() < self.link.loss:
            self.link.lose(self, self.link.rng.random() * _NOTICED_WITHIN_S)


class LocalCall:
    """The client's end, of any kind of call."""

    def __init__(self, wire: _Wire, serialize: Callable[[Any], bytes], parse: Callable[[bytes], Any]) -> None:
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
        self._give_up(_Status(grpc.StatusCode.CANCELLED, "Locally cancelled by application!"))
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

    async def _status(self) -> _Status:
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
        self._give_up(_Status(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))

    def _give_up(self, status: _Status) -> None:
        wire = self._wire
        wire.responses.arrived.clear()
        wire.requests.lane.send(wire.server_lost)
        wire.end(status)


class LocalChannel:
    """To one address, from one host."""

    def __init__(self, transport: "LocalTransport", host: str, address: str) -> None:
        self._transport = transport
        self._host = host
        self._address = address
        self._calls: dict[LocalCall, None] = {}

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

    def _multicallable(self, method: str, serialize: Any, parse: Any, *, streams: bool, is_unary: bool = False) -> Any:
        def start(requests: Any = None, *, timeout: float | None = None, metadata: Metadata = (), **_: Any) -> Any:
            link = self._transport.network.link(self._host, self._transport.host_of(self._address))
            wire = _Wire(link, method, timeout, metadata or ())
            call = LocalCall(wire, serialize, parse)
            self._calls[call] = None
            wire.on_status.append(lambda: self._calls.pop(call, None))
            wire.requests.lane.send(lambda: self._transport.arrive(self._address, wire))
            if not streams:
                call.send_only(requests)
                if is_unary and link.repeats and link.rng.random() < link.repeats:
                    self._repeat(link, wire, serialize(requests))
            elif requests is not None:
                call.feed(requests)
            return call

        return start

    def _repeat(self, link: Link, wire: _Wire, request: bytes) -> None:
        """The same request once more, a little later; nobody hears the second answer."""

        def again() -> None:
            copy = _Wire(link, wire.method, wire.timeout_s, wire.metadata)
            copy.requests.lane.send(lambda: self._transport.arrive(self._address, copy))
            copy.requests.send(request)
            copy.requests.finish()

        asyncio.get_running_loop().call_later(link.rng.random() * _REPEAT_WITHIN_S, again)


@dataclass(frozen=True, slots=True)
class _CallDetails(grpc.HandlerCallDetails):
    method: str
    invocation_metadata: Any


class LocalContext:
    """The server's end, as the servicer sees it."""

    def __init__(self, wire: _Wire, serialize: Callable[[Any], bytes], parse: Callable[[bytes], Any]) -> None:
        self._wire = wire
        self._serialize = serialize
        self._parse = parse
        self._code = grpc.StatusCode.OK
        self._details = ""
        self._trailing: Metadata = ()
        self._callbacks: list[Callable[[Any], None]] = []
        self.has_ended = False
        loop = asyncio.get_running_loop()
        self._deadline_s = None if wire.timeout_s is None else loop.time() + wire.timeout_s
        self._timer = loop.call_at(self._deadline_s, wire.server_lost) if self._deadline_s is not None else None

    async def read(self) -> Any:
        data = await self._wire.requests.next(lambda: self._wire.is_lost)
        return _EOF if data is None else self._parse(data)

    async def write(self, message: Any) -> None:
        if self.has_ended:
            raise grpc.aio.UsageError("RPC already finished.")
        await self._wire.responses.room(lambda: self._wire.is_lost)
        if self._wire.is_lost:
            raise grpc.aio.InternalError('Failed "execute_batch": the call is cancelled')
        self._wire.may_break()
        self._wire.responses.send(self._serialize(message))

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()) -> None:
        if self.has_ended:
            raise grpc.aio.UsageError("Abort already called!")
        self.finish(_Status(code, details, trailing_metadata or self._trailing))
        raise grpc.aio.AbortError("Locally aborted.")

    def finish(self, status: _Status | None = None) -> None:
        """With what was set, where nothing else is said."""
        if not self.has_ended:
            self.has_ended = True
            if self._timer is not None:
                self._timer.cancel()
            if not self._wire.is_lost:
                self._wire.answer(status or _Status(self._code, self._details, self._trailing))
            for callback in self._callbacks:
                callback(self)

    def set_code(self, code: grpc.StatusCode) -> None:
        self._code = code

    def set_details(self, details: str) -> None:
        self._details = details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def set_trailing_metadata(self, metadata: Metadata) -> None:
        self._trailing = metadata

    def trailing_metadata(self) -> Metadata:
        return self._trailing

    async def send_initial_metadata(self, metadata: Metadata) -> None:
        """Nobody here reads it."""

    def invocation_metadata(self) -> Any:
        return tuple(self._wire.metadata)

    def time_remaining(self) -> float | None:
        if self._deadline_s is None:
            return None
        return max(0.0, self._deadline_s - asyncio.get_running_loop().time())

    def peer(self) -> str:
        return "local:"

    def cancelled(self) -> bool:
        return self._wire.is_lost and not self.has_ended

    def done(self) -> bool:
        return self._wire.is_lost or self.has_ended

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._callbacks.append(callback)


class LocalServer:
    """In place of `grpc.aio.Server`."""

    def __init__(self, transport: "LocalTransport", host: str, interceptors: Sequence[Any] = ()) -> None:
        self._transport = transport
        self.host = host
        self._interceptors = interceptors
        self._handlers: list[Any] = []
        self._addresses: list[str] = []
        self._running: dict[asyncio.Task[None], LocalContext] = {}
        self._closing: dict[asyncio.Task[None], None] = {}
        self._wires: dict[_Wire, None] = {}
        self.is_serving = False

    def add_generic_rpc_handlers(self, handlers: Iterable[Any]) -> None:
        self._handlers += handlers

    def add_registered_method_handlers(self, service: str, handlers: Any) -> None:
        """They are among the generic ones too."""

    def add_insecure_port(self, address: str) -> int:
        """Raises RuntimeError for one that is taken."""
        port = self._transport.bind(self, address)
        self._addresses.append(f"{address.rpartition(':')[0]}:{port}")
        return port

    async def start(self) -> None:
        self.is_serving = True

    async def stop(self, grace: float | None) -> None:
        """Refuses new calls; those that run have so many seconds."""
        self.is_serving = False
        if self._running and grace:
            await asyncio.wait(list(self._running), timeout=grace)
        for task, context in list(self._running.items()):
            context.finish(_Status(grpc.StatusCode.UNAVAILABLE, "Cancelling all calls"))
            task.cancel()
        ending = [*self._running, *self._closing]
        if ending:
            await asyncio.wait(ending)
        self._unbind()

    def kill(self) -> None:
        """The process is gone: its calls break, nothing that it still does reaches anybody."""
        self.is_serving = False
        self._unbind()
        for wire in list(self._wires):
            lane = Lane(wire.link)
            lane.send(lambda wire=wire: wire.client_lost("Socket closed"))  # type: ignore[misc]
            wire.server_lost()

    async def ended(self) -> None:
        """Once all that ran in it has ended."""
        while ending := [*self._running, *self._closing]:
            await asyncio.wait(ending)

    def accept(self, wire: _Wire) -> None:
        if not self.is_serving:
            wire.answer(_Status(grpc.StatusCode.UNAVAILABLE, "the server is shutting down"))
            return
        # Made here: a call that is cancelled before it has begun never runs.
        task = asyncio.create_task(self._serve(wire))
        self._wires[wire] = None
        task.add_done_callback(lambda _: self._wires.pop(wire))

    async def _serve(self, wire: _Wire) -> None:
        handler = await self._handler(wire)
        if handler is None:
            wire.answer(_Status(grpc.StatusCode.UNIMPLEMENTED, "Method not found!"))
            return
        context = LocalContext(wire, handler.response_serializer, handler.request_deserializer)
        task = asyncio.create_task(self._run(handler, context))
        self._running[task] = context
        task.add_done_callback(lambda _: self._running.pop(task))
        wire.on_lost = task.cancel
        if wire.is_lost:
            task.cancel()
        await asyncio.wait({task})

    async def _handler(self, wire: _Wire) -> Any:
        async def found(details: grpc.HandlerCallDetails) -> Any:
            services = (handler.service(details) for handler in self._handlers)
            return next((method for method in services if method is not None), None)

        continuation = found
        for interceptor in reversed(self._interceptors):
            continuation = _intercepted(interceptor, continuation)
        return await continuation(_CallDetails(wire.method, tuple(wire.metadata)))

    async def _run(self, handler: Any, context: LocalContext) -> None:
        try:
            await self._answer(handler, context)
            context.finish()
        except grpc.aio.AbortError:
            pass
        except asyncio.CancelledError:
            context.finish(_Status(grpc.StatusCode.CANCELLED, "RPC cancelled"))
        except Exception as error:  # noqa: BLE001 - as gRPC does
            context.finish(_Status(grpc.StatusCode.UNKNOWN, f"Unexpected {type(error)}: {error}"))
        finally:
            context.finish(_Status(grpc.StatusCode.CANCELLED))

    async def _answer(self, handler: Any, context: LocalContext) -> None:
        behaviour = handler.stream_stream or handler.stream_unary or handler.unary_stream or handler.unary_unary
        request = _Requests(context) if handler.request_streaming else await context.read()
        if request is _EOF:
            return
        answer = behaviour(request, context)
        if not hasattr(answer, "__aiter__"):
            response = await answer
            if not handler.response_streaming and not context.has_ended:
                await context.write(response)
            return
        try:
            async for response in answer:
                await context.write(response)
        finally:
            # As in gRPC, where the loop closes what nobody holds any more: in a task of its own.
            closing = asyncio.create_task(answer.aclose())
            self._closing[closing] = None
            closing.add_done_callback(lambda task: self._closing.pop(task))

    def _unbind(self) -> None:
        for address in self._addresses:
            self._transport.servers.pop(address, None)


class _Requests:
    """A servicer that iterates over its requests does so by reading."""

    def __init__(self, context: LocalContext) -> None:
        self._context = context

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (request := await self._context.read()) is not _EOF:
            yield request


class LocalTransport:
    """All servers of one simulation, and the way to them."""

    def __init__(self, network: Network, trace: Trace = lambda line: None) -> None:
        self.network = network
        self.servers: dict[str, LocalServer] = {}
        self._hosts: dict[str, str] = {}
        self._trace = trace
        self._next_port = 20_000

    def server(self, host: str, interceptors: Sequence[Any] = ()) -> LocalServer:
        return LocalServer(self, host, interceptors)

    def channel(self, host: str, address: str) -> LocalChannel:
        return LocalChannel(self, host, address)

    def host_of(self, address: str) -> str:
        return self._hosts.get(address, address)

    def bind(self, server: LocalServer, address: str) -> int:
        host, _, port = address.rpartition(":")
        number = int(port)
        if not number:
            self._next_port += 1
            number = self._next_port
        place = f"{host}:{number}"
        if place in self.servers:
            raise RuntimeError(f"Failed to bind to address {place}")
        self.servers[place] = server
        self._hosts[place] = server.host
        return number

    def arrive(self, address: str, wire: _Wire) -> None:
        server = self.servers.get(address)
        self._trace(f"call {wire.method} at {address}")
        if server is None:
            wire.answer(_Status(grpc.StatusCode.UNAVAILABLE, f"failed to connect to {address}: connection refused"))
        else:
            server.accept(wire)


def _intercepted(interceptor: Any, continuation: Any) -> Any:
    async def step(details: grpc.HandlerCallDetails) -> Any:
        return await interceptor.intercept_service(continuation, details)

    return step
