"""The server's side: servers and contexts, as the generated servicers use them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from fault_sim.local_grpc.addresses import Addresses
from fault_sim.local_grpc.wire import Metadata, Status, Wire
from fault_sim.network import Lane

_EOF = grpc.aio.EOF  # type: ignore[attr-defined]  # missing in grpc-stubs


@dataclass(frozen=True, slots=True)
class _CallDetails(grpc.HandlerCallDetails):
    method: str
    invocation_metadata: Any


class LocalContext:
    """The server's end, as the servicer sees it."""

    def __init__(
        self,
        wire: Wire,
        serialize: Callable[[Any], bytes],
        parse: Callable[[bytes], Any],
        on_wait: Callable[[float], None],
    ) -> None:
        self._wire = wire
        self._serialize = serialize
        self._parse = parse
        self._on_wait = on_wait
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
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            await self._wire.responses.room(lambda: self._wire.is_lost)
        finally:
            self._on_wait(loop.time() - began_s)
        if self._wire.is_lost:
            raise grpc.aio.InternalError('Failed "execute_batch": the call is cancelled')
        self._wire.may_break()
        self._wire.responses.send(self._serialize(message))

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()) -> None:
        if self.has_ended:
            raise grpc.aio.UsageError("Abort already called!")
        self.finish(Status(code, details, trailing_metadata or self._trailing))
        raise grpc.aio.AbortError("Locally aborted.")

    def finish(self, status: Status | None = None) -> None:
        """With what was set, where nothing else is said."""
        if not self.has_ended:
            self.has_ended = True
            if self._timer is not None:
                self._timer.cancel()
            if not self._wire.is_lost:
                self._wire.answer(status or Status(self._code, self._details, self._trailing))
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

    def __init__(self, addresses: Addresses, host: str, interceptors: Sequence[Any] = ()) -> None:
        self._addresses = addresses
        self.host = host
        self._interceptors = interceptors
        self._handlers: list[Any] = []
        self._listens_at: list[str] = []
        self._running: dict[asyncio.Task[None], LocalContext] = {}
        self._closing: dict[asyncio.Task[None], None] = {}
        self._wires: dict[Wire, None] = {}
        self.is_serving = False
        # The longest that a message has waited for its client to read.
        self.longest_wait_s = 0.0

    def add_generic_rpc_handlers(self, handlers: Iterable[Any]) -> None:
        self._handlers += handlers

    def add_registered_method_handlers(self, service: str, handlers: Any) -> None:
        """They are among the generic ones too."""

    def add_insecure_port(self, address: str) -> int:
        """Raises RuntimeError for one that is taken."""
        port = self._addresses.bind(self, address)
        self._listens_at.append(f"{address.rpartition(':')[0]}:{port}")
        return port

    async def start(self) -> None:
        self.is_serving = True

    async def stop(self, grace: float | None) -> None:
        """Refuses new calls; those that run have so many seconds."""
        self.is_serving = False
        if self._running and grace:
            await asyncio.wait(list(self._running), timeout=grace)
        for task, context in list(self._running.items()):
            context.finish(Status(grpc.StatusCode.UNAVAILABLE, "Cancelling all calls"))
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

    def accept(self, wire: Wire) -> None:
        if not self.is_serving:
            wire.answer(Status(grpc.StatusCode.UNAVAILABLE, "the server is shutting down"))
            return
        # Made here: a call that is cancelled before it has begun never runs.
        task = asyncio.create_task(self._serve(wire))
        self._wires[wire] = None
        task.add_done_callback(lambda _: self._wires.pop(wire))

    async def _serve(self, wire: Wire) -> None:
        handler = await self._handler(wire)
        if handler is None:
            wire.answer(Status(grpc.StatusCode.UNIMPLEMENTED, "Method not found!"))
            return
        context = LocalContext(wire, handler.response_serializer, handler.request_deserializer, self._waited)
        task = asyncio.create_task(self._run(handler, context))
        self._running[task] = context
        task.add_done_callback(lambda _: self._running.pop(task))
        wire.on_lost = task.cancel
        if wire.is_lost:
            task.cancel()
        await asyncio.wait({task})

    async def _handler(self, wire: Wire) -> Any:
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
            context.finish(Status(grpc.StatusCode.CANCELLED, "RPC cancelled"))
        except Exception as error:  # noqa: BLE001 - as gRPC does
            context.finish(Status(grpc.StatusCode.UNKNOWN, f"Unexpected {type(error)}: {error}"))
        finally:
            context.finish(Status(grpc.StatusCode.CANCELLED))

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
            # As in gRPC, where the loop closes a generator that is not referenced any more: in a task of its own.
            closing = asyncio.create_task(answer.aclose())
            self._closing[closing] = None
            closing.add_done_callback(lambda task: self._closing.pop(task))

    def _waited(self, seconds: float) -> None:
        self.longest_wait_s = max(self.longest_wait_s, seconds)

    def _unbind(self) -> None:
        for address in self._listens_at:
            self._addresses.unbind(address)


class _Requests:
    """A servicer that iterates over its requests does so by reading."""

    def __init__(self, context: LocalContext) -> None:
        self._context = context

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (request := await self._context.read()) is not _EOF:
            yield request


def _intercepted(interceptor: Any, continuation: Any) -> Any:
    async def step(details: grpc.HandlerCallDetails) -> Any:
        return await interceptor.intercept_service(continuation, details)

    return step
