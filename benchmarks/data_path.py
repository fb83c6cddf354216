"""What a token costs on its way from a decode worker to its client: CPU of the worker's process and of the router's.

The engine computes nothing (`paced_engine`), so that what is left is the service's own. One decode worker, one router,
many streams of endless answers, read by a process of its own:

    loads        the engine steps at rates that a GPU has; what comes, and at what cost. Above what the way carries,
                 what waits for a client is brought to it in fewer messages
    before       the same worker called without a router, each call with messages of its own, one for each token, as it
                 was before outputs came by the step: its cost, and that of the process that reads them
"""

import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.child_module import cpu_s, running, said
from benchmarks.data_path_client import Load
from benchmarks.kept_command import KeptCommand
from benchmarks.paced_worker import PacedWorker
from builtin_model import WEIGHTS
from control_plane.service.embedded_redis import EmbeddedRedis

SERVICE = "data-path"

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Carried:
    """Of one load. steps_per_s: of the engine. CPU is of a process: all of its threads."""

    steps_per_s: float
    tokens_per_s: float
    tokens_per_message: float
    worker_us_per_token: float
    # Of the router, or where there is none of the process that reads.
    router_us_per_token: float

    @property
    def router_tokens_per_s(self) -> float:
        """That one core of the router carries, at this cost."""
        return 1e6 / self.router_us_per_token


@dataclass(frozen=True, slots=True)
class DataPathReport:
    """loads: the heaviest comes last. before: at the lightest."""

    streams: int
    loads: tuple[Carried, ...]
    before: Carried

    def table(self) -> dict[str, Any]:
        heaviest = self.loads[-1]
        return {
            "streams": self.streams,
            "worker_us_per_token": heaviest.worker_us_per_token,
            "router_us_per_token": heaviest.router_us_per_token,
            "router_tokens_per_s": round(heaviest.router_tokens_per_s),
            "before": asdict(self.before),
            "loads": [asdict(load) for load in self.loads],
        }


class DataPathBenchmark:
    """folder: for what its processes need, and their logs."""

    def __init__(self, folder: Path, streams: int, seconds: float, say: Say) -> None:
        self._folder = folder
        self._streams = streams
        self._seconds = seconds
        self._say = say

    async def run(self, rates: Sequence[float]) -> DataPathReport:
        """rates: steps of the engine in a second, the slowest first."""
        redis = EmbeddedRedis(self._folder)
        await redis.start()
        try:
            loads = [await self._through_a_router(redis.url, rate) for rate in rates]
            return DataPathReport(self._streams, tuple(loads), await self._directly(redis.url, rates[0]))
        finally:
            await redis.stop()

    async def _through_a_router(self, redis_url: str, rate: float) -> Carried:
        self._say(f"{self._streams} streams, {rate:g} steps/s")
        settings = {
            "model.path": str(WEIGHTS),
            "service.name": SERVICE,
            "redis.url": redis_url,
            "router.max_in_flight_requests": self._streams,
        }
        async with self._worker(redis_url, rate) as (worker, _):
            router = KeptCommand("route", settings, self._folder)
            await router.start()
            try:
                assert router.process is not None
                return await self._carried(
                    Load(router.address, 0, self._streams, self._seconds), rate, worker, router.process.pid
                )
            finally:
                await router.stop()

    async def _directly(self, redis_url: str, rate: float) -> Carried:
        self._say(f"{self._streams} streams, each call with messages of its own")
        async with self._worker(redis_url, rate) as (worker, up):
            load = Load(up["address"], up["generation"], self._streams, self._seconds)
            return await self._carried(load, rate, worker, None)

    async def _carried(self, load: Load, rate: float, worker: int, router: int | None) -> Carried:
        """Worker and router are process ids; without a router it is the reading process that counts."""
        async with running("benchmarks.data_path_client", asdict(load), self._folder) as client:
            await said(client)
            measured = [psutil.Process(pid) for pid in (worker, *((router,) if router else ()))]
            before = [cpu_s(process) for process in measured]
            told = await said(client)
            took = [cpu_s(process) - each for process, each in zip(measured, before, strict=True)]
        worker_s, router_s = took if router else (*took, told["cpu_s"])
        tokens = max(1, told["tokens"])
        return Carried(
            steps_per_s=rate,
            tokens_per_s=round(tokens / told["seconds"], 1),
            tokens_per_message=round(tokens / max(1, told["messages"]), 2),
            worker_us_per_token=round(1e6 * worker_s / tokens, 2),
            router_us_per_token=round(1e6 * router_s / tokens, 2),
        )

    @asynccontextmanager
    async def _worker(self, redis_url: str, rate: float) -> AsyncIterator[tuple[int, Mapping[str, Any]]]:
        """Its process, and what it says of itself."""
        worker = PacedWorker(redis_url, SERVICE, str(WEIGHTS), str(WEIGHTS), self._streams, rate)
        async with running("benchmarks.paced_worker", asdict(worker), self._folder) as process:
            yield process.pid, await said(process)


async def measure(streams: int, seconds: float, rates: Sequence[float], say: Say) -> DataPathReport:
    with tempfile.TemporaryDirectory(prefix="rachis-data-path-") as folder:
        return await DataPathBenchmark(Path(folder), streams, seconds, say).run(rates)
