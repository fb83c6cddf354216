"""Which services each door of a router answers, where administration has an address of its own.

    public           router.host, router.port               prompts and sessions
    administration   router.admin_host, router.admin_port   all of that, and the admin API

So commands that ask for an answer too, as `rachis doctor` does, need one address. Where a router has one door, it is
that of administration.
"""

from collections.abc import Mapping
from enum import StrEnum


class DoorKind(StrEnum):
    PUBLIC = "public"
    ADMINISTRATION = "administration"


ROUTER_SERVICE = "rachis.v1.RouterService"
ADMIN_SERVICE = "rachis.v1.AdminService"
HEALTH_SERVICE = "grpc.health.v1.Health"
REFLECTION_SERVICE = "grpc.reflection.v1alpha.ServerReflection"

_EVERYWHERE = (ROUTER_SERVICE, HEALTH_SERVICE, REFLECTION_SERVICE)
SERVICES: Mapping[DoorKind, tuple[str, ...]] = {
    DoorKind.PUBLIC: _EVERYWHERE,
    DoorKind.ADMINISTRATION: (ADMIN_SERVICE, *_EVERYWHERE),
}


def doors_of(method: str) -> tuple[DoorKind, ...]:
    """Those that answer it. method: as gRPC calls it, `/package.Service/Method`."""
    service = method.split("/")[1]
    return tuple(door for door, services in SERVICES.items() if service in services)
