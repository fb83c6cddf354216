"""One worker's gRPC server: WorkerService, and standard health checking (grpc.health.v1).

health of                      SERVING while
"" and WorkerService           the worker takes requests: its state is READY
"liveness"                     its loop runs at all, draining or starting included
"""

import asyncio

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from rachis import conventions
from rachis.v1 import worker_pb2 as wire
from rachis.v1 import worker_pb2_grpc

from cluster_core.ports import PortRange, address_of, hold_port
from cluster_wire.members import MembersOnly
from cluster_wire.secret import Secret
from cluster_wire.worker_tls import add_worker_port

LIVENESS = "liveness"
WORKER_SERVICE = wire.DESCRIPTOR.services_by_name["WorkerService"].full_name
_SERVING, _NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


class WorkerServer:
    """`start`, then `stop`. record: the worker's own; `state_changed` has its health follow it. ports: None for any."""

    def __init__(
        self,
        record: wire.WorkerRegistration,
        max_message_bytes: int,
        host: str,
        ports: PortRange | None,
        secret: Secret | None = None,
    ) -> None:
        """secret: of the service whose parts may call, encrypted; None: anybody may, as plain text."""
        self._record = record
        self._host = host
        self._ports = ports
        self._secret = secret
        self._server = grpc.aio.server(
            interceptors=[MembersOnly(secret)] if secret is not None else (),
            options=conventions.channel_options(max_message_bytes),
        )
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._changed = asyncio.Event()
        self._following: asyncio.Task[None] | None = None

    async def start(self, servicer: worker_pb2_grpc.WorkerServiceServicer) -> str:
        """Where it listens. Raises StartError when none of the ports is free."""
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        port = hold_port(self._host, self._ports, "pools.ports") if self._ports is not None else 0
        port = add_worker_port(self._server, address_of(self._host, port), self._secret)
        await self._health.set(LIVENESS, _SERVING)
        await self._set_health()
        self._following = asyncio.create_task(self._follow())
        await self._server.start()
        return address_of(self._host, port)

    def state_changed(self) -> None:
        self._changed.set()

    async def stop(self, grace_s: float) -> None:
        """Calls that still run are cut off after so long."""
        if self._following is not None:
            self._following.cancel()
        await self._server.stop(grace_s)

    async def _follow(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._set_health()

    async def _set_health(self) -> None:
        status = _SERVING if self._record.state == wire.WORKER_STATE_READY else _NOT_SERVING
        for name in ("", WORKER_SERVICE):
            await self._health.set(name, status)
