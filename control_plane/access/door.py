"""The door of a router: no call is looked at before its caller may make it, and what changes things is written down.

A caller whom the router knows costs a look into a table. Who brings a key is logged in before the call begins; who has
shown a certificate and brings none, when it begins: gRPC tells of the connection then. What runs when a key is revoked
goes on to its end; a call that has none ends with the next thing it would tell.
"""

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc

from cluster_core.errors import NotSupportedError, OverloadedError, RachisError
from cluster_wire import calls
from cluster_wire.calls import Context
from cluster_wire.members import CallMetadata
from control_plane.access.access import Access, KeyedAccess, address_of, certificate_of
from control_plane.access.audit import AuditLog
from control_plane.access.roles import ANYBODY, ENDLESS_RPCS, RPC_NEEDS, Identity, Need, need_of_rpc

_Behaviour = Callable[[Any, Context], Any]
# Of a call that tells how it goes, before it has ended.
_BEGUN = "BEGUN"
_ELSEWHERE = "administration is answered at an address of its own: see router.admin_host and router.admin_port"
# Of no kind: it is refused.
_ANSWERED_ELSEWHERE = grpc.unary_unary_rpc_method_handler(lambda request, context: None)


class Door(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """The first of a server's interceptors. `follow` until cancelled, then `close`."""

    def __init__(self, access: Access, audit: AuditLog) -> None:
        self.access = access
        self._audit = audit

    async def follow(self) -> None:
        await self.access.follow()

    async def refusal(self, metadata: CallMetadata, certificate: bytes | None, need: Need) -> RachisError | None:
        """Why a call that is none of gRPC's is not answered. certificate: PEM, that its connection has shown."""
        if isinstance(self.access, KeyedAccess) and self.access.goes_by_certificate(metadata):
            return _certified(self.access, metadata, certificate, need)[1]
        return (await self._admitted(metadata, need))[1]

    def close(self) -> None:
        self.access.close()
        self._audit.close()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        method: str = handler_call_details.method
        if handler is None and method not in RPC_NEEDS:
            return None
        elsewhere = NotSupportedError(_ELSEWHERE) if handler is None else None
        if method in ENDLESS_RPCS and handler is not None:
            handler = self._asking_again(handler, RPC_NEEDS[method])
        asked = _Asked(self._audit, method, handler or _ANSWERED_ELSEWHERE, elsewhere)
        metadata = handler_call_details.invocation_metadata or ()
        access = self.access
        if asked.need is not Need.NOTHING and isinstance(access, KeyedAccess) and access.goes_by_certificate(metadata):
            return asked.once_known(partial(_certified_by, access))
        return asked.by(*await self._admitted(metadata, asked.need))

    def _asking_again(self, handler: Any, need: Need) -> Any:
        """The same handler, which tells its caller nothing more once another call of theirs would be refused."""

        async def streamed(request: Any, context: Context) -> AsyncIterator[Any]:
            async with aclosing(_behaviour(handler)(request, context)) as responses:
                async for response in responses:
                    metadata = context.invocation_metadata() or ()
                    refusal = await self.refusal(metadata, certificate_of(context), need)
                    if isinstance(refusal, OverloadedError):
                        # Who that is cannot be told now: they are told nothing, and the next thing perhaps.
                        continue
                    if refusal is not None:
                        await calls.abort(context, refusal)
                        return
                    yield response

        return calls.handler_maker(handler)(streamed, handler.request_deserializer, handler.response_serializer)

    async def _admitted(self, metadata: CallMetadata, need: Need) -> tuple[Identity | None, RachisError | None]:
        """Who calls, and why not."""
        if need is Need.NOTHING or not isinstance(self.access, KeyedAccess):
            return ANYBODY, None
        caller: Identity | None = None
        try:
            caller = await self.access.login(metadata)
            self.access.check(caller, need)
        except RachisError as refusal:
            return caller, refusal
        return caller, None


def _certified_by(access: KeyedAccess, context: Context, need: Need) -> tuple[Identity | None, RachisError | None]:
    return _certified(access, context.invocation_metadata() or (), certificate_of(context), need)


def _certified(
    access: KeyedAccess, metadata: CallMetadata, shown: bytes | None, need: Need
) -> tuple[Identity | None, RachisError | None]:
    """Who calls, by a certificate, and why not."""
    caller: Identity | None = None
    try:
        caller = access.certified(metadata, shown)
        access.check(caller, need)
    except RachisError as refusal:
        return caller, refusal
    return caller, None


@dataclass(frozen=True, slots=True)
class _Asked:
    """What somebody calls. elsewhere: this door does not answer it, whoever calls."""

    audit: AuditLog
    method: str
    handler: Any
    elsewhere: RachisError | None

    @property
    def need(self) -> Need:
        return need_of_rpc(self.method)

    def by(self, caller: Identity | None, refusal: RachisError | None) -> Any:
        """What answers that caller."""
        visit = _Visit(self.audit, self.method, caller)
        is_written = self.audit.is_on and self.need is Need.OPERATE
        refusal = refusal or self.elsewhere
        if refusal is not None:
            return calls.handler_maker(self.handler)(visit.refusing(refusal, is_written=is_written))
        return visit.written(self.handler) if is_written else self.handler

    def once_known(self, who: Callable[[Context, Need], tuple[Identity | None, RachisError | None]]) -> Any:
        """What answers a caller whom the call itself shows: before its message is parsed.

        Those of a stream are parsed as they are read, which is later still.
        """
        is_stream = self.handler.request_streaming

        def begun(request: Any, context: Context) -> Any:
            answering = self.by(*who(context, self.need))
            parse = None if is_stream else answering.request_deserializer
            return _behaviour(answering)(request if parse is None else parse(request), context)

        async def answered(request: Any, context: Context) -> Any:
            try:
                return await begun(request, context)
            except grpc.aio.AbortError as aborted:
                raise calls.without_frames(aborted) from None
            finally:
                del request, context

        async def streamed(request: Any, context: Context) -> AsyncIterator[Any]:
            try:
                answer = begun(request, context)
                if inspect.isawaitable(answer):
                    # It is refused.
                    await answer
                    return
                async with aclosing(answer) as responses:
                    async for response in responses:
                        yield response
            except grpc.aio.AbortError as aborted:
                raise calls.without_frames(aborted) from None
            finally:
                del request, context

        wrapped = streamed if inspect.isasyncgenfunction(_behaviour(self.handler)) else answered
        deserializer = self.handler.request_deserializer if is_stream else None
        return calls.handler_maker(self.handler)(wrapped, deserializer, self.handler.response_serializer)


def _behaviour(handler: Any) -> Any:
    return handler.stream_stream or handler.unary_stream or handler.unary_unary


@dataclass(frozen=True, slots=True)
class _Visit:
    """One call at the door. caller: None where it is not known."""

    audit: AuditLog
    method: str
    caller: Identity | None

    def refusing(self, refusal: RachisError, *, is_written: bool) -> _Behaviour:
        """What is answered instead; the message is not parsed."""

        async def refuse(request: Any, context: Context) -> None:
            if is_written:
                self._write(context, None, refusal.status)
            await calls.abort(context, refusal)

        return refuse

    def written(self, handler: Any) -> Any:
        """The same handler, whose calls are written down. They have one message."""
        behaviour = _behaviour(handler)

        async def answered(request: Any, context: Context) -> Any:
            async with self._writing(request, context):
                return await behaviour(request, context)

        async def streamed(request: Any, context: Context) -> AsyncIterator[Any]:
            self._write(context, request, _BEGUN)
            async with self._writing(request, context):
                async for response in behaviour(request, context):
                    yield response

        wrapped = streamed if inspect.isasyncgenfunction(behaviour) else answered
        return calls.handler_maker(handler)(wrapped, handler.request_deserializer, handler.response_serializer)

    @asynccontextmanager
    async def _writing(self, request: Any, context: Context) -> AsyncIterator[None]:
        """How the call inside ends is written down."""
        status = "INTERNAL"
        try:
            yield
            status = "OK"
        except grpc.aio.AbortError as aborted:
            status = getattr(context.code(), "name", str(context.code()))
            raise calls.without_frames(aborted) from None
        except (asyncio.CancelledError, GeneratorExit):
            status = "CANCELLED"
            raise
        finally:
            self._write(context, request, status)

    def _write(self, context: Context, request: Any, status: str) -> None:
        self.audit.write(self.caller, address_of(context.peer()), self.method, request, status)
