"""The door of a router: no handler runs before its caller may call it, and what changes things is written down.

A caller whom the router knows costs a look into a table. Others are looked at before their message is parsed.
"""

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from cluster_core.errors import RachisError
from cluster_wire import calls
from cluster_wire.calls import Context
from control_plane.access.access import Access, KeyedAccess, Metadata, address_of
from control_plane.access.audit import AuditLog
from control_plane.access.roles import Identity, Need, need_of_rpc

_Behaviour = Callable[[Any, Context], Any]


class Door(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """The first of a server's interceptors. `follow` until cancelled, then `close`."""

    def __init__(self, access: Access, audit: AuditLog) -> None:
        self.access = access
        self._audit = audit

    async def follow(self) -> None:
        await self.access.follow()

    def close(self) -> None:
        self.access.close()
        self._audit.close()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method: str = handler_call_details.method
        need = need_of_rpc(method)
        is_written = self._audit.is_on and need is Need.OPERATE
        if not is_written and self._is_known(handler_call_details.invocation_metadata or (), need):
            return handler
        visit = _Visit(self.access, self._audit if is_written else None, method, need, handler.request_deserializer)
        return visit.of(handler)

    def _is_known(self, metadata: Metadata, need: Need) -> bool:
        """Whether nothing has to be asked."""
        if need is Need.NOTHING or not isinstance(self.access, KeyedAccess):
            return True
        known = self.access.known(metadata)
        return known is not None and known.may(need)


@dataclass(slots=True)
class _Visit:
    """One call at the door. audit: where it is written down. request: its message, once it has come."""

    access: Access
    audit: AuditLog | None
    method: str
    need: Need
    parse: Callable[[bytes], Any] | None
    request: Any = None

    def of(self, handler: Any) -> Any:
        """The same handler behind the door. Of a call with one message the bytes wait there."""
        serializer = handler.response_serializer
        if handler.request_streaming:
            behaviour = self._streaming(handler.stream_stream, lambda messages: messages)
            return grpc.stream_stream_rpc_method_handler(behaviour, self.parse, serializer)
        if handler.response_streaming:
            behaviour = self._streaming(handler.unary_stream, self._parsed)
            return grpc.unary_stream_rpc_method_handler(behaviour, bytes, serializer)
        return grpc.unary_unary_rpc_method_handler(self._single(handler.unary_unary), bytes, serializer)

    def _single(self, behaviour: _Behaviour) -> _Behaviour:
        async def visited(data: bytes, context: Context) -> Any:
            try:
                async with self._admitted(context):
                    return await behaviour(self._parsed(data), context)
            finally:
                del data, context

        return visited

    def _streaming(self, behaviour: _Behaviour, parsed: Callable[[Any], Any]) -> _Behaviour:
        async def written(given: Any, context: Context) -> None:
            try:
                async with self._admitted(context):
                    await behaviour(parsed(given), context)
            finally:
                del given, context

        async def yielded(given: Any, context: Context) -> AsyncIterator[Any]:
            try:
                async with self._admitted(context):
                    async for response in behaviour(parsed(given), context):
                        yield response
            finally:
                del given, context

        return yielded if inspect.isasyncgenfunction(behaviour) else written

    def _parsed(self, data: bytes) -> Any:
        assert self.parse is not None, "messages of all our methods are parsed"
        request = self.parse(data)
        if self.audit is not None:
            self.request = request
        return request

    @asynccontextmanager
    async def _admitted(self, context: Context) -> AsyncIterator[None]:
        """The call runs inside, if it may; how it ends is written down."""
        caller: Identity | None = None
        status = "INTERNAL"
        try:
            caller = await self._caller(context)
            yield
            status = "OK"
        except RachisError as error:
            status = error.status
            await calls.abort(context, error)
            raise
        except grpc.aio.AbortError as aborted:
            code = context.code()
            status = getattr(code, "name", str(code))
            raise calls.without_frames(aborted) from None
        except (asyncio.CancelledError, GeneratorExit):
            status = "CANCELLED"
            raise
        finally:
            if self.audit is not None:
                self.audit.write(caller, address_of(context.peer()), self.method, self.request, status)

    async def _caller(self, context: Context) -> Identity:
        """Raises ClientFault, OverloadedError."""
        if not isinstance(self.access, KeyedAccess):
            return self.access.identity(context)
        caller = await self.access.login(tuple(context.invocation_metadata() or ()), context.peer())
        self.access.check(caller, self.need)
        return caller
