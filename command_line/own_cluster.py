"""A service with a second router, and a Redis of its own, for the length of one command: `chaos`, `bench migration`."""

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.chaos_targets import SecondRouter
from cluster_configs.loading import LoadedConfig
from cluster_core.errors import StartError
from command_line.own_service import target_service
from control_plane.service.embedded_redis import EmbeddedRedis
from control_plane.service.state import StateFile

TWO_OF_EACH: Mapping[str, object] = {
    "pools.prefill.workers": 2,
    "pools.decode.workers": 2,
    "pools.prefill.cpus_per_worker": 0.25,
    "pools.decode.cpus_per_worker": 0.25,
}


@dataclass(frozen=True, slots=True)
class OwnCluster:
    """address: of the router of `rachis serve`, whose process has this id. router: the second one."""

    address: str
    pid: int
    redis: EmbeddedRedis
    router: SecondRouter
    _loaded: LoadedConfig

    @property
    def addresses(self) -> tuple[str, str]:
        return self.address, self.router.address

    def another_router(self, **values: object) -> SecondRouter:
        """One that is not started. values: that are others than the service's, with `__` for the dot."""
        return SecondRouter(_arguments(self._loaded, values))


@asynccontextmanager
async def own_cluster(load: Callable[[str | None], LoadedConfig], state_file: StateFile) -> AsyncIterator[OwnCluster]:
    """load: the configuration with this Redis."""
    with tempfile.TemporaryDirectory(prefix="rachis-own-") as folder:
        own_redis = EmbeddedRedis(Path(folder))
        await own_redis.start()
        keeping = asyncio.create_task(own_redis.keep())
        loaded = load(own_redis.url)
        router = SecondRouter(_arguments(loaded, {}))
        try:
            async with target_service(None, state_file, loaded, always_own=True) as target:
                await router.start()
                if target.pid is None:
                    raise StartError("an own service has a process")
                yield OwnCluster(target.address, target.pid, own_redis, router, loaded)
        finally:
            await router.stop()
            keeping.cancel()
            await own_redis.stop()


def _arguments(loaded: LoadedConfig, others: Mapping[str, object]) -> list[str]:
    """What makes another router of the same service."""
    values = {entry.key: entry.value for entry in loaded.entries if entry.source != "default"}
    values.update({key.replace("__", "."): value for key, value in others.items()})
    values.pop("router.port", None)
    return [part for key, value in values.items() for part in ("--set", f"{key}={json.dumps(value)}")]
