"""The admin API, called in the router's own process as gRPC would call it: through one door, to the same handlers.

So a call of the console needs the role that the gRPC call of that name needs, is written down in the same audit log,
and is answered with the same message.
"""

import asyncio
import inspect
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import Message
from rachis.v1 import admin_pb2, admin_pb2_grpc, router_pb2_grpc

from cluster_core.errors import RachisError
from control_plane.access.access import AUTHORIZATION, CERTIFICATE
from control_plane.access.door import Door
from control_plane.metrics.probe_server import ShownBy

logger = logging.getLogger(__name__)

_ADMIN = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
# What may be called over HTTP, by name: no call that brings a prompt along.
METHODS: Mapping[str, str] = {
    "GetIdentity": "/rachis.v1.RouterService/GetIdentity",
    **{
        name: f"/{_ADMIN}/{name}"
        for name in (
            "GetOverview",
            "WatchOverview",
            "GetHistory",
            "GetRouterStatus",
            "GetPools",
            "ListWorkers",
            "ListRequests",
            "GetTrace",
            "ListPlacements",
            "GetHottestPrefixes",
            "GetIndexStatus",
            "DrainWorker",
            "ResumeWorker",
            "RemoveWorker",
            "ScalePools",
            "RestartWorkers",
        )
    },
}


class Refused(Exception):
    """status: name of the gRPC status."""

    def __init__(self, status: str, sentence: str) -> None:
        super().__init__(f"{status}: {sentence}")
        self.status = status
        self.sentence = sentence


@dataclass(frozen=True, slots=True)
class Caller:
    """shown: by what. peer: as gRPC names one."""

    shown: ShownBy
    peer: str


class AdminCalls:
    """Of one router; everything here runs on its loop."""

    def __init__(self, door: Door, router: Any, admin: admin_pb2_grpc.AdminServiceServicer) -> None:
        """router: the servicer of RouterService."""
        self._door = door
        self._handlers: dict[str, Any] = {}
        registering = _Registering(self._handlers)
        router_pb2_grpc.add_RouterServiceServicer_to_server(router, registering)  # type: ignore[arg-type]
        admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, registering)  # type: ignore[arg-type]

    @property
    def is_open(self) -> bool:
        """Nobody is asked for a key."""
        return self._door.access.is_open

    async def answers(self, name: str, request: Message, caller: Caller) -> AsyncGenerator[Message, None]:
        """name: in `METHODS`. One message, or of a call that tells how it goes those that come. Raises Refused."""
        method = METHODS[name]
        context = _Context(caller)
        details = _Details(method, context.invocation_metadata())
        handler = await self._door.intercept_service(self._found, details)
        behaviour = handler.unary_stream or handler.unary_unary
        try:
            # As gRPC has it: what parses a message by itself gets its bytes.
            is_parsed = handler.request_deserializer is not None
            answer = behaviour(request if is_parsed else request.SerializeToString(), context)
            if inspect.isawaitable(answer):
                yield await answer
                return
            async for message in answer:
                yield message
        except grpc.aio.AbortError:
            raise context.refused() from None
        except RachisError as error:
            raise Refused(error.status, str(error)) from None
        except (asyncio.CancelledError, GeneratorExit, Refused):
            raise
        except Exception as error:
            logger.exception("a call of the console failed: %s", name)
            raise Refused("INTERNAL", f"the router failed to answer: {type(error).__name__}") from None

    async def _found(self, details: grpc.HandlerCallDetails) -> Any:
        return self._handlers[details.method]


class _Registering:
    """Stands in for a server when handlers are put on it."""

    def __init__(self, handlers: dict[str, Any]) -> None:
        self._handlers = handlers

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        """The same ones come by name, too."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        self._handlers.update({f"/{service}/{name}": handler for name, handler in handlers.items()})


@dataclass(frozen=True, slots=True)
class _Details(grpc.HandlerCallDetails):
    method: str
    invocation_metadata: tuple[tuple[str, str | bytes], ...]


class _Context:
    """What the door and handlers of the admin API ask of a call."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._code: grpc.StatusCode | None = None
        self._sentence = ""

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        given = self._caller.shown.authorization
        return ((AUTHORIZATION, given),) if given is not None else ()

    def auth_context(self) -> Mapping[str, Sequence[bytes]]:
        shown = self._caller.shown.certificate
        return {CERTIFICATE: [shown]} if shown is not None else {}

    def peer(self) -> str:
        return self._caller.peer

    def code(self) -> grpc.StatusCode | None:
        return self._code

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: object = ()) -> None:
        self._code, self._sentence = code, details
        raise grpc.aio.AbortError

    def refused(self) -> Refused:
        return Refused(self._code.name if self._code is not None else "INTERNAL", self._sentence)
