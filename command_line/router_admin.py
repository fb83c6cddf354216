"""Shared by commands that call a router's admin service: how long they wait, and values' names as people read them."""

from rachis.v1 import admin_pb2 as admin
from rachis.v1 import worker_pb2 as wire

TIMEOUT_S = 10.0


def pool_name(pool: wire.Pool.ValueType) -> str:
    return wire.Pool.Name(pool).removeprefix("POOL_").lower()


def phase_name(phase: admin.PoolPhase.ValueType) -> str:
    return admin.PoolPhase.Name(phase).removeprefix("POOL_PHASE_").lower()
