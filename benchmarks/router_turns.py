"""Routers that are equal but for one thing, asked in turns: what that one thing costs, as ratios within a round.

All of them are up at once; a round asks each the same number of requests, never two at once, another one first in each
round, and every other round backwards. A ratio is to the first one in the same round: the median over rounds, between
the quartiles. CPU is that of a process in its own turns, all threads, in hundredths of a second: of short turns its
ratios are coarse, and the totals say more.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import psutil
from rachis import AsyncClient

from benchmarks import child_module
from benchmarks.kept_command import KeptCommand

# Sends the request of a name: TTFT and the whole time, in milliseconds.
Ask = Callable[[str], Awaitable[tuple[float, float]]]


@dataclass(frozen=True, slots=True)
class Turn:
    """One router's requests in one round. CPU is of each request. traced: share of the client's time that the stages of
    its trace explain."""

    ttft_ms: float
    end_to_end_ms: float
    router_us: float
    traced: float | None = None
    worker_us: float = 0.0


@dataclass(frozen=True, slots=True)
class Spread:
    """Over rounds."""

    median: float
    low: float
    high: float


@dataclass(slots=True)
class Arm:
    """A router, and what came of its turns. worker: the process of its worker, where that is looked at."""

    name: str
    router: KeptCommand
    client: AsyncClient
    worker: psutil.Process | None = None
    turns: list[Turn] = field(default_factory=list)

    @property
    def process(self) -> psutil.Process:
        assert self.router.process is not None
        return psutil.Process(self.router.process.pid)

    async def turn(self, names: Sequence[str], concurrency: int, ask: Ask) -> tuple[Turn, dict[str, float]]:
        """And how long each request took in all, in milliseconds."""
        slots = asyncio.Semaphore(concurrency)

        async def one(name: str) -> tuple[float, float]:
            async with slots:
                return await ask(name)

        before_s = self._cpu_s()
        took = await asyncio.gather(*map(one, names))
        router_s, worker_s = (after - before for after, before in zip(self._cpu_s(), before_s, strict=True))
        whole_ms = dict(zip(names, (end_to_end for _, end_to_end in took), strict=True))
        turn = Turn(
            float(np.median([ttft for ttft, _ in took])),
            float(np.median(list(whole_ms.values()))),
            router_s / len(names) * 1e6,
            worker_us=worker_s / len(names) * 1e6,
        )
        return turn, whole_ms

    def _cpu_s(self) -> tuple[float, float]:
        return child_module.cpu_s(self.process), child_module.cpu_s(self.worker) if self.worker is not None else 0.0


def spread(values: Sequence[float]) -> Spread:
    low, median, high = (round(float(each), 4) for each in np.quantile(values, (0.25, 0.5, 0.75)))
    return Spread(median, low, high)


def in_turn(arms: Sequence[Arm], number: int) -> list[Arm]:
    """The order of a round: after as many rounds as there are arms, and as many backwards, each was in each place."""
    first = number // 2 % len(arms)
    order = [*arms[first:], *arms[:first]]
    return order[::-1] if number % 2 else order


def compared(off: Sequence[Turn], on: Sequence[Turn]) -> dict[str, Any]:
    """Ratios of `on` to `off`, round by round; CPU also in all."""
    found: dict[str, Any] = {}
    for name in ("ttft_ms", "end_to_end_ms", "router_us", "worker_us"):
        ratios = [getattr(mine, name) / max(getattr(base, name), 1e-9) for base, mine in zip(off, on, strict=True)]
        found[name.rpartition("_")[0]] = asdict(spread(ratios))
    for name in ("router_us", "worker_us"):
        whole = sum(getattr(turn, name) for turn in on) / max(sum(getattr(turn, name) for turn in off), 1e-9)
        found[f"{name.rpartition('_')[0]}_in_all"] = round(whole, 4)
    return found


def medians(turns: Sequence[Turn]) -> dict[str, float]:
    return {
        name: round(float(np.median([getattr(turn, name) for turn in turns])), 3)
        for name in ("ttft_ms", "end_to_end_ms", "router_us", "worker_us")
    }
