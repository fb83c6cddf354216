"""Whose the requests of a fuzzer are: the same tenant for the same name, without a draw."""

from typing import Any
from zlib import crc32

from cluster_core.engine_jobs import TENANT_ARG, TenantShare


def tenant_argument(tenants: int, name: str) -> dict[str, Any]:
    """Among the extra arguments of a request of this name. tenants: 0: requests are nobody's."""
    if not tenants:
        return {}
    number = crc32(name.encode()) % tenants
    return {TENANT_ARG: TenantShare(f"tenant {number}", 1.0 + number)}
