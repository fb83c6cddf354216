"""What one client that does its worst costs the others: their latency, the router's loop, and its memory afterwards."""

import asyncio
import random
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import grpc
import psutil
from rachis import AsyncClient, token_prompt

from benchmarks.router_page import samples
from cluster_core.bound_child import bind_to_parent
from cluster_core.clock import monotonic_s

_STALL = "rachis_router_loop_stall_seconds"
_LATE = "rachis_router_loop_late_seconds"
_CLIENTS = 4
_PROMPT_TOKENS = 64
_QUIET_S = 15.0
# After the last call of the hostile client, for what its deadlines still hold.
_SETTLE_S = 15.0
_VOCABULARY = 250


@dataclass(frozen=True, slots=True)
class HostileReport:
    """Latencies are of whole small requests of the others. failed: of them, while the hostile client was there.

    loop_stall: by the loop's own work; loop_late: with its waits for a processor, which the hostile client takes, too.
    """

    loop_stall_p99_ms: float
    loop_stall_longest_ms: float
    loop_late_p99_ms: float
    others_p50_ratio: float
    memory_after_ratio: float
    quiet_p50_ms: float
    hostile_p50_ms: float
    requests: int
    failed: int


async def measure(address: str, pid: int, seconds: float) -> HostileReport:
    """Of a router at this address, whose process this is."""
    process = psutil.Process(pid)
    await _others(address, 3.0)
    quiet, _ = await _others(address, _QUIET_S)
    memory_before, before = process.memory_info().rss, await _loop(address)
    hostile = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.hostile_client", address, str(seconds), preexec_fn=bind_to_parent
    )
    during, failed = await _others(address, seconds)
    await hostile.wait()
    after = await _loop(address)
    await asyncio.sleep(_SETTLE_S)
    stalls, late = (
        {bound: after[name][bound] - before[name].get(bound, 0.0) for bound in after[name]} for name in (_STALL, _LATE)
    )
    return HostileReport(
        loop_stall_p99_ms=_quantile(stalls, 0.99) * 1000,
        loop_stall_longest_ms=_quantile(stalls, 1.0) * 1000,
        loop_late_p99_ms=_quantile(late, 0.99) * 1000,
        others_p50_ratio=statistics.median(during) / statistics.median(quiet),
        memory_after_ratio=process.memory_info().rss / memory_before,
        quiet_p50_ms=statistics.median(quiet) * 1000,
        hostile_p50_ms=statistics.median(during) * 1000,
        requests=len(during),
        failed=failed,
    )


async def _others(address: str, seconds: float) -> tuple[list[float], int]:
    """Latencies of some well-behaved clients' requests, and how many of these failed."""
    end_s, rng = monotonic_s() + seconds, random.Random(0)
    latencies: list[float] = []
    failed = 0

    async def one() -> None:
        nonlocal failed
        async with AsyncClient(address) as client:
            while monotonic_s() < end_s:
                prompt = token_prompt([rng.randrange(_VOCABULARY) for _ in range(_PROMPT_TOKENS)])
                began_s = monotonic_s()
                try:
                    await client.generate(prompt, timeout_s=60.0, max_tokens=8, ignore_eos=True, temperature=0.0)
                except grpc.aio.AioRpcError:
                    failed += 1
                    await asyncio.sleep(0.1)
                else:
                    latencies.append(monotonic_s() - began_s)

    await asyncio.gather(*(one() for _ in range(_CLIENTS)))
    return latencies, failed


async def _loop(address: str) -> Mapping[str, Mapping[float, float]]:
    """Cumulative counts of how long the router's loop was held up, and late, by their upper bounds."""
    found = await samples(address)
    return {
        name: {float(each.labels["le"]): each.value for each in found if each.name == f"{name}_bucket"}
        for name in (_STALL, _LATE)
    }


def _quantile(cumulative: Mapping[float, float], share: float) -> float:
    """The upper bound of the bucket that so much of all lies in or below; of what is above all, the last bound."""
    bounds = sorted(cumulative)
    total = cumulative[bounds[-1]]
    finite = [bound for bound in bounds if bound != float("inf")]
    return next((bound for bound in finite if cumulative[bound] >= share * total), finite[-1])
