"""The gRPC servers of a router: one for each of its doors, with the services that this door answers.

How large messages are, how many calls a connection has, and who looks at a call first is alike for all.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.descriptor import FileDescriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2
from rachis import conventions
from rachis.v1 import admin_pb2, admin_pb2_grpc, router_pb2, router_pb2_grpc

from cluster_configs.listening import Listening, administration_of, prompts_of
from cluster_configs.schema import RachisConfig, SecuritySection
from cluster_core.errors import StartError, UnavailableError
from cluster_core.ports import address_of
from control_plane.access.certificates import grpc_credentials
from control_plane.access.door import Door
from control_plane.access.doors import (
    ADMIN_SERVICE,
    HEALTH_SERVICE,
    REFLECTION_SERVICE,
    ROUTER_SERVICE,
    SERVICES,
    DoorKind,
)
from control_plane.fleet.membership import Membership
from control_plane.intake.malformed_input import MOST_NUMBERS, MalformedInputInterceptor
from control_plane.model.limits import MOST_ENTRIES

# Above our limit and this much more gRPC itself refuses a message before it is received; below a sentence does.
_SENTENCE_BYTES = 1 << 20
# Calls of one connection at a time are bounded by what the router takes in all, and this many more.
_SPARE_STREAMS = 1024
# What a client may have on its way to a session that is not read. gRPC would widen it by measurement, to megabytes.
_STREAM_WINDOW_BYTES = 256 << 10
_FIXED_WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", _STREAM_WINDOW_BYTES)]


_FILES: Mapping[str, FileDescriptor] = {
    ADMIN_SERVICE: admin_pb2.DESCRIPTOR,
    ROUTER_SERVICE: router_pb2.DESCRIPTOR,
    HEALTH_SERVICE: health_pb2.DESCRIPTOR,
    REFLECTION_SERVICE: reflection_pb2.DESCRIPTOR,
}


@dataclass(frozen=True, slots=True)
class RouterServicers:
    """What answers the calls of each service."""

    router: router_pb2_grpc.RouterServiceServicer
    admin: admin_pb2_grpc.AdminServiceServicer
    health: Any


class GrpcServer:
    """One door: `listen`, then `start`, then `stop`. setting: that names its port."""

    def __init__(self, kind: DoorKind, at: Listening, setting: str, server: grpc.aio.Server) -> None:
        """server: nothing is on it yet, and it listens nowhere."""
        self.kind = kind
        self._at = at
        self._setting = setting
        self._server = server

    def listen(self, servicers: RouterServicers, security: SecuritySection) -> str:
        """Puts the door's services on the server; returns its address. Raises ConfigError, StartError."""
        services = SERVICES[self.kind]
        if ADMIN_SERVICE in services:
            admin_pb2_grpc.add_AdminServiceServicer_to_server(servicers.admin, self._server)
        router_pb2_grpc.add_RouterServiceServicer_to_server(servicers.router, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(servicers.health, self._server)
        reflection.enable_server_reflection(services, self._server, _pool_of(services))
        return address_of(self._at.host, self._bind(security))

    async def start(self) -> None:
        await self._server.start()

    async def stop(self, grace_s: float) -> None:
        """No new calls; those that run finish within that time, or are cut off."""
        await self._server.stop(grace=grace_s)

    def _bind(self, security: SecuritySection) -> int:
        try:
            if security.certificate_file is None:
                return self._server.add_insecure_port(str(self._at))
            return self._server.add_secure_port(str(self._at), grpc_credentials(security))
        except RuntimeError:
            sentence = f"cannot listen on {self._at}; is another service running there?"
            raise StartError(sentence, field=self._setting) from None


def make_servers(
    make: Callable[..., grpc.aio.Server], config: RachisConfig, membership: Membership, door: Door
) -> tuple[GrpcServer, ...]:
    """make: as `grpc.aio.server`. That of administration comes last; where it is not apart, it is the only one."""
    prompts, administration = prompts_of(config.router), administration_of(config.router)
    if administration is None:
        return (GrpcServer(DoorKind.ADMINISTRATION, prompts, "router.port", _made(make, config, membership, door)),)
    public = _made(make, config, membership, door, share_port=config.router.share_port)
    return (
        GrpcServer(DoorKind.PUBLIC, prompts, "router.port", public),
        GrpcServer(DoorKind.ADMINISTRATION, administration, "router.admin_port", _made(make, config, membership, door)),
    )


def _made(
    make: Callable[..., grpc.aio.Server],
    config: RachisConfig,
    membership: Membership,
    door: Door,
    *,
    share_port: bool = False,
) -> grpc.aio.Server:
    section, limit_bytes = config.router, config.router.max_message_mib << 20
    streams = section.max_in_flight_requests + section.max_queued_requests + config.streaming.max_client_sessions
    return make(
        interceptors=[door, MalformedInputInterceptor(limit_bytes, lambda: _most_numbers(membership))],
        options=[
            *conventions.channel_options(limit_bytes + _SENTENCE_BYTES, share_port=share_port),
            ("grpc.max_concurrent_streams", streams + _SPARE_STREAMS),
            *_FIXED_WINDOW,
        ],
    )


def _pool_of(services: tuple[str, ...]) -> descriptor_pool.DescriptorPool:
    """What reflection tells of: files of these services, and those that they import."""
    pool, added = descriptor_pool.DescriptorPool(), set[str]()
    for service in services:
        _add(pool, _FILES[service], added)
    return pool


def _add(pool: descriptor_pool.DescriptorPool, file: FileDescriptor, added: set[str]) -> None:
    if file.name in added:
        return
    added.add(file.name)
    for dependency in file.dependencies:
        _add(pool, dependency, added)
    proto = descriptor_pb2.FileDescriptorProto()
    file.CopyToProto(proto)
    pool.Add(proto)


def _most_numbers(membership: Membership) -> int:
    """Token ids in one message: as many as the model takes, where a worker has told its length."""
    try:
        return max(membership.served_model().max_model_len, MOST_ENTRIES)
    except UnavailableError:
        return MOST_NUMBERS
