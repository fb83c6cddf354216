"""A service of two routers on a Ray and a replicated Redis of its own, for one command: `chaos`, `bench migration`."""

import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.kept_command import KeptCommand
from benchmarks.one_host_ray import one_host_ray
from benchmarks.replicated_redis import ReplicatedRedis, replicated_redis
from cluster_configs.loading import LoadedConfig
from command_line.output import phases
from command_line.own_service import own_settings, show_phase

TWO_OF_EACH: Mapping[str, object] = {
    "pools.prefill.workers": 2,
    "pools.decode.workers": 2,
    "pools.prefill.cpus_per_worker": 0.25,
    "pools.decode.cpus_per_worker": 0.25,
}
# Where the service's Redis and Ray are: the last settings of its configuration.
Places = Mapping[str, object]
_RAY_CPUS = 4


@dataclass(frozen=True, slots=True)
class OwnCluster:
    """service: `rachis serve`. router: the second one."""

    service: KeptCommand
    router: KeptCommand
    redis: ReplicatedRedis
    _settings: Mapping[str, object]
    _folder: Path

    @property
    def addresses(self) -> tuple[str, str]:
        return self.service.address, self.router.address

    def another_router(self, **values: object) -> KeptCommand:
        """One that is not started. values: that are others than the service's, with `__` for the dot."""
        others = {key.replace("__", "."): value for key, value in values.items()}
        return KeptCommand("route", {**self._settings, **others}, self._folder)


@asynccontextmanager
async def own_cluster(load: Callable[[Places], LoadedConfig]) -> AsyncIterator[OwnCluster]:
    """load: the configuration with these settings in place of its own. Raises StartError."""
    with tempfile.TemporaryDirectory(prefix="rachis-own-") as name:
        folder = Path(name)
        async with replicated_redis(folder) as own_redis, one_host_ray(_RAY_CPUS) as ray:
            loaded = load({"redis.url": own_redis.url, "ray.address": ray.address})
            settings = own_settings(loaded)
            service, router = (KeptCommand(name, settings, folder) for name in ("serve", "route"))
            try:
                with phases() as display:
                    await service.start(partial(show_phase, display))
                    await router.start()
                yield OwnCluster(service, router, own_redis, settings, folder)
            finally:
                await router.stop()
                await service.stop()
