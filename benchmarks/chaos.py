"""Faults of every kind on a real service, with streams open all the time: who gets no answer, a wrong one, or waits.

Two prefill and two decode workers and two routers of the built-in model, or of the one that is configured; answers are
compared with those of one plain vLLM, which has computed them before.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc
from rachis import AsyncClient

from benchmarks.chaos_schedule import Fault
from benchmarks.chaos_streams import KINDS, Case, Streams, Tally
from benchmarks.chaos_targets import Targets
from benchmarks.direct_call import DirectWorker
from benchmarks.plain_engine import GENERATION, plain_engine
from cluster_configs.schema import RachisConfig
from cluster_core.clock import monotonic_s

STREAMS = 20
_CASES = 32
# Most answers to one prompt.
_CHOICES = 3
_PROMPT_TOKENS = (20, 600)
_NEW_TOKENS = (8, 40)
# How long leases, restarts and quarantines may take to end once all is quiet.
_QUIET_TIMEOUT_S = 180.0


@dataclass(frozen=True, slots=True)
class Leaks:
    """What is still held when nothing runs any more."""

    blocks: int
    leases: int
    requests: int

    def __bool__(self) -> bool:
        return bool(self.blocks or self.leases or self.requests)


async def cases(config: RachisConfig, seed: int) -> list[Case]:
    """Prompts that partly share their beginnings, with the answers of plain vLLM."""
    rng = random.Random(seed)
    found = []
    async with plain_engine(config) as (address, model):
        plain = DirectWorker(address, GENERATION)
        bases = [[rng.randrange(model.vocabulary_size) for _ in range(_PROMPT_TOKENS[1])] for _ in range(4)]
        for _ in range(_CASES):
            length = rng.randint(*_PROMPT_TOKENS)
            shared = rng.randrange(length)
            prompt = rng.choice(bases)[:shared] + [rng.randrange(model.vocabulary_size) for _ in range(length - shared)]
            kind = rng.choice(list(KINDS))
            sampling = {**KINDS[kind], "max_tokens": rng.randint(*_NEW_TOKENS), "seed": rng.randrange(1 << 30)}
            if kind == "stops":
                # Whatever its answer has at some place, so that it ends there.
                whole = await plain.decode(prompt, sampling)
                sampling["stop"] = [whole.text[len(whole.text) * 3 // 4 :][:3] or "never"]
            seeds = range(sampling["seed"], sampling["seed"] + (_CHOICES if kind == "seeded" else 1))
            choices = [await plain.decode(prompt, {**sampling, "seed": seed}) for seed in seeds]
            found.append(Case(tuple(prompt), sampling, choices))
        await plain.close()
    return found


async def play(
    found: Sequence[Case],
    faults: Sequence[Fault],
    targets: Targets,
    addresses: Sequence[str],
    duration_s: float,
    *,
    seed: int,
    on_fault: Callable[[Fault], None] = lambda fault: None,
) -> Tally:
    """All the streams and all the faults; returns when every request has ended."""
    streams = Streams(found, ",".join(addresses), seed)
    began_s = monotonic_s()
    running = asyncio.create_task(streams.run(STREAMS))
    try:
        for fault in faults:
            await asyncio.sleep(max(0.0, began_s + fault.at_s - monotonic_s()))
            on_fault(fault)
            await targets.inflict(fault)
        await asyncio.sleep(max(0.0, began_s + duration_s - monotonic_s()))
        streams.stopping = True
        await running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    return streams.tally


async def leaks(addresses: Sequence[str]) -> Leaks:
    """What stays held, once nothing changes any more, or it has taken too long."""
    found = Leaks(1, 0, 0)
    try:
        async with asyncio.timeout(_QUIET_TIMEOUT_S):
            while found:
                await asyncio.sleep(1.0)
                found = await _held(addresses)
    except TimeoutError:
        pass
    return found


async def _held(addresses: Sequence[str]) -> Leaks:
    blocks = leases = requests = 0
    for address in addresses:
        async with AsyncClient(address) as client:
            try:
                views, status = await client.workers(), await client.router_status()
            except grpc.aio.AioRpcError:
                return Leaks(0, 0, 1)
        # A worker that does not answer has no load in its view: it is still being started.
        requests += status.in_flight_requests + sum(view.in_flight_requests for view in views)
        requests += sum(not view.HasField("load") for view in views)
        blocks = sum(view.load.total_blocks - view.load.free_blocks for view in views)
        leases = sum(view.load.leased_handoffs for view in views)
    return Leaks(blocks, leases, requests)


def report(tally: Tally, left: Leaks, faults: dict[str, int]) -> dict[str, object]:
    """As `rachis chaos --json` prints it."""
    pauses_s = sorted(tally.pauses_s) or [0.0]
    return {
        "requests": tally.requests,
        "completed_share": tally.first_try / tally.requests if tally.requests else 0.0,
        "application_retries": tally.application_retries,
        "wrong": tally.wrong,
        "tokens_twice": tally.tokens_twice,
        "migrations": tally.migrations,
        "resumes": tally.resumes,
        "unended": tally.unended,
        "leaked_blocks": left.blocks,
        "leaked_leases": left.leases,
        "leaked_requests": left.requests,
        "pause_p99_s": pauses_s[int(0.99 * (len(pauses_s) - 1))],
        "longest_pause_s": pauses_s[-1],
        "faults": faults,
        "completed": tally.completed,
        "statuses": dict(sorted(tally.statuses.items())),
    }
