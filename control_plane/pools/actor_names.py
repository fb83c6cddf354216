"""What a worker's actor is called on Ray. By its name alone the next `rachis serve` knows whether it may take it over.

`<worker id>:<digest of its settings>:<start>`; later starts of one worker have later names.
"""

import hashlib
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from cluster_core.clock import unix_ms
from cluster_core.ids import registry_digest
from control_plane.model.worker_snapshot import Pool
from control_plane.pools.pool_sections import POOL_NAMES
from worker_runtime.host import WorkerSettings

_POOLS = {name: pool for pool, name in POOL_NAMES.items()}


def namespace(service_id: str, redis_url: str) -> str:
    """Ray's, of all actors of a service: of one name on one Redis, which is where only one can have it."""
    return f"{_namespaces(service_id)}{registry_digest(redis_url)}"


def is_namesake(found: str, service_id: str, redis_url: str) -> bool:
    """The namespace of a service of the same name on another Redis."""
    return found.startswith(_namespaces(service_id)) and found != namespace(service_id, redis_url)


def _namespaces(service_id: str) -> str:
    # No name of a service has a dot.
    return f"rachis.{service_id}."


def settings_digest(settings: WorkerSettings, demand: Mapping[str, Any]) -> str:
    """Equal for workers that could stand in for each other: of one pool, configuration, registry and version, and the
    same to Ray."""
    told = repr((replace(settings, worker_id=""), sorted(demand.items())))
    return hashlib.sha256(told.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, order=True)
class ActorName:
    """start: no two are equal, and a later one is greater."""

    worker_id: str
    start: str
    settings: str

    @classmethod
    def of(cls, settings: WorkerSettings, demand: Mapping[str, Any]) -> "ActorName":
        start = f"{unix_ms():013d}-{secrets.token_hex(4)}"
        return cls(settings.worker_id, start, settings_digest(settings, demand))

    @classmethod
    def parse(cls, name: str) -> "ActorName | None":
        """None for a name that no service has given."""
        parts = name.split(":")
        if len(parts) != 3 or parts[0].rpartition("-")[0] not in _POOLS:
            return None
        worker_id, settings, start = parts
        return cls(worker_id, start, settings)

    @property
    def pool(self) -> Pool:
        return _POOLS[self.worker_id.rpartition("-")[0]]

    def __str__(self) -> str:
        return f"{self.worker_id}:{self.settings}:{self.start}"


def fitting(names: Iterable[ActorName], digests: Mapping[Pool, str]) -> set[ActorName]:
    """Those that may be taken over. digests: of the settings of each pool that the service has now."""
    return {name for name in newest(names) if name.settings == digests.get(name.pool)}


def newest(names: Iterable[ActorName]) -> set[ActorName]:
    """Of each worker the last that was started: another one of that name is on its way out."""
    last: dict[str, ActorName] = {}
    for name in names:
        last[name.worker_id] = max(name, last.get(name.worker_id, name))
    return set(last.values())
