"""A load that shifts from long prompts to long answers and back, on workers that do both: `rachis bench roles`.

Requests of both kinds come all the time, at their own rates; in a phase one of the two kinds comes often. Every answer
is compared with that of one plain vLLM, which has computed all of them before. How many workers are prefill-heavy is
read off the router's page of metrics; that no engine was started again is in the registrations.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import grpc
from rachis import AsyncClient, token_prompt

from benchmarks import router_page
from benchmarks.direct_call import DirectWorker
from benchmarks.measuring_process import Reports
from benchmarks.plain_engine import GENERATION, plain_engine
from cluster_configs.schema import RachisConfig
from cluster_core.clock import monotonic_s

PREFILL_HEAVY = "rachis_placement_prefill_heavy_workers"
LONG_PROMPTS = "long prompts"
LONG_ANSWERS = "long answers"
# What comes often, phase after phase.
PHASES = (LONG_PROMPTS, LONG_ANSWERS, LONG_PROMPTS)
# How often the kind comes that is not the phase's, of its own rate.
_SELDOM = 0.1
_LOOK_S = 0.5
_AT_ONCE = 32
_DEADLINE_S = 120.0


@dataclass(frozen=True, slots=True)
class Kind:
    """Requests of one sort. per_s: how many come a second in the phase that is theirs."""

    prompt_tokens: int
    answer_tokens: int
    per_s: float


@dataclass(frozen=True, slots=True)
class Shift:
    """What comes. seconds: of each phase."""

    kinds: dict[str, Kind]
    seconds: float
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Arrival:
    """at_s: since the beginning of its phase."""

    phase: int
    at_s: float
    token_ids: tuple[int, ...]
    answer_tokens: int


@dataclass(slots=True)
class PhaseTally:
    """heavy: prefill-heavy workers, and since when in the phase there were so many, at each change. ttft_s: of those
    that were answered, in the order of their ends."""

    requests: int = 0
    wrong: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    ttft_s: list[float] = field(default_factory=list)
    heavy: list[tuple[float, int]] = field(default_factory=list)


def arrivals(shift: Shift, vocabulary: int) -> list[Arrival]:
    """All of a run, phase by phase; no prompt shares its beginning with another."""
    found = []
    for phase, often in enumerate(PHASES):
        for name, kind in shift.kinds.items():
            rng = Random(f"{shift.seed}/{phase}/{name}")
            per_s = kind.per_s * (1.0 if name == often else _SELDOM)
            at_s = rng.expovariate(per_s)
            while at_s < shift.seconds:
                prompt = tuple(rng.randrange(vocabulary) for _ in range(kind.prompt_tokens))
                found.append(Arrival(phase, at_s, prompt, kind.answer_tokens))
                at_s += rng.expovariate(per_s)
    return sorted(found, key=lambda each: (each.phase, each.at_s))


async def expected(config: RachisConfig, shift: Shift, reports: Reports) -> tuple[list[Arrival], list[list[int]]]:
    """All of a run, and the tokens with which one plain vLLM of this configuration answers each."""
    places = asyncio.Semaphore(_AT_ONCE)
    async with plain_engine(config) as (address, model):
        plain = DirectWorker(address, GENERATION)
        wanted = arrivals(shift, model.vocabulary_size)
        reports.total(len(wanted))

        async def answer(each: Arrival) -> list[int]:
            async with places:
                generated = await plain.decode(list(each.token_ids), _sampling(each))
            reports.done()
            return list(generated.token_ids)

        answers = await asyncio.gather(*map(answer, wanted))
        await plain.close()
    return wanted, list(answers)


async def play(
    address: str, shift: Shift, wanted: Sequence[Arrival], right: Sequence[list[int]], reports: Reports
) -> list[PhaseTally]:
    """All phases, one after the other; a request that its phase leaves behind goes on beside the next one."""
    tallies = [PhaseTally() for _ in PHASES]
    reports.total(len(wanted))
    async with AsyncClient(address) as client, asyncio.TaskGroup() as tasks:
        tasks.create_task(_look(address, tallies, shift.seconds))
        began_s = monotonic_s()
        for each, tokens in zip(wanted, right, strict=True):
            await asyncio.sleep(max(0.0, began_s + each.phase * shift.seconds + each.at_s - monotonic_s()))
            asked = tasks.create_task(_ask(client, each, tokens, tallies[each.phase]))
            asked.add_done_callback(lambda _: reports.done())
    return tallies


async def starts(address: str) -> dict[str, int]:
    """The generation of each worker."""
    async with AsyncClient(address) as client:
        views = await client.workers()
    return {view.registration.worker_id: view.registration.generation for view in views}


def report(tallies: Sequence[PhaseTally], before: dict[str, int], after: dict[str, int]) -> dict[str, Any]:
    """As `rachis bench roles --json` prints it."""
    return {
        "workers": len(before),
        "restarts": sum(before[name] != after.get(name) for name in before),
        "requests": sum(each.requests for each in tallies),
        "failed": sum(each.failed.total() for each in tallies),
        "wrong": sum(each.wrong for each in tallies),
        "phases": [
            {
                "load": load,
                "requests": each.requests,
                "failed": dict(each.failed),
                "wrong": each.wrong,
                "ttft_p50_s": _quantile(each.ttft_s, 0.5),
                "ttft_p90_s": _quantile(each.ttft_s, 0.9),
                "prefill_heavy": [[round(at_s, 1), heavy] for at_s, heavy in each.heavy],
                "heavy_at_end": each.heavy[-1][1],
                "settled_s": round(each.heavy[-1][0], 1),
            }
            for load, each in zip(PHASES, tallies, strict=True)
        ],
    }


async def _ask(client: AsyncClient, each: Arrival, right: list[int], tally: PhaseTally) -> None:
    tally.requests += 1
    began_s, first_s = monotonic_s(), None
    got: list[int] = []
    try:
        async for piece in client.stream(token_prompt(each.token_ids), timeout_s=_DEADLINE_S, **_sampling(each)):
            if not hasattr(piece, "route"):
                if first_s is None and piece.token_ids:
                    first_s = monotonic_s() - began_s
                got += piece.token_ids
    except grpc.aio.AioRpcError as error:
        tally.failed[error.code().name] += 1
        tally.wrong += got != right[: len(got)]
        return
    tally.wrong += got != right
    if first_s is not None:
        tally.ttft_s.append(first_s)


async def _look(address: str, tallies: Sequence[PhaseTally], seconds: float) -> None:
    for tally in tallies:
        began_s = monotonic_s()
        tally.heavy.append((0.0, await _prefill_heavy(address)))
        while (at_s := monotonic_s() - began_s) < seconds:
            if (heavy := await _prefill_heavy(address)) != tally.heavy[-1][1]:
                tally.heavy.append((at_s, heavy))
            await asyncio.sleep(_LOOK_S)


async def _prefill_heavy(address: str) -> int:
    found = await router_page.samples(address)
    return int(next(sample.value for sample in found if sample.name == PREFILL_HEAVY))


def _sampling(each: Arrival) -> dict[str, Any]:
    return {"max_tokens": each.answer_tokens, "temperature": 0.0, "ignore_eos": True}


def _quantile(values: Iterable[float], share: float) -> float | None:
    ordered = sorted(values)
    return round(ordered[int(share * (len(ordered) - 1))], 3) if ordered else None
