"""Cells of the grid of objectives on the real service over imitated GPUs: `rachis bench system --grid --imitated`.

The service gets the requests that the simulator gets at the same rate and seed; what is imitated is a slow kind of GPU,
so that two cores are enough. Of each set-up the share of requests that keep both objectives, measured beside simulated:

    pools_50    half of the workers prefill, placement by hotness
    shared      workers that do both, by hotness
    hybrid      the same workers by the objectives of the cell; a service of its own for each cell

A request that is refused has not kept them. The first quarter of the requests warms up.
"""

import asyncio
import random
from asyncio import TaskGroup
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from pydantic import ValidationError
from rachis import AsyncClient, RachisError, token_prompt
from rachis.v1 import generation_pb2 as generation

from benchmarks.quiet import ForeignLoad
from benchmarks.system_grid import HYBRID, WARM_UP, GridStudy, requests_of, simulate
from benchmarks.validation.cluster import Prompt
from benchmarks.validation.imitated import SETTINGS
from benchmarks.validation.loads import prompts_of
from cluster_core.clock import monotonic_s
from cluster_core.errors import ConfigError, InvalidInputError, Ungrouped
from cluster_sim.costs import catalog
from cluster_sim.workloads.requests import SimRequest, block_names

WORKERS = 4
# TTFT in s, TPOT in ms.
CELLS = ((1.0, 50.0), (2.0, 50.0), (2.0, 100.0))
_COSTS = catalog.load(SETTINGS["engine.cost_model"])
STUDY = GridStudy(
    kind="short_conversation", file=None, sizes=(WORKERS,), rates=(2.5, 4.0), splits=(0.5,), seeds=(0,), seconds=40.0,
    cost_model=_COSTS.name, ttft_s=(1.0, 2.0), tpot_ms=(50.0, 100.0),
    pools={
        "max_batched_tokens": SETTINGS["engine.max_batched_tokens"],
        "host_tokens": (SETTINGS["tiers.host_gib"] << 30) // _COSTS.kv_bytes_per_token,
    },
)  # fmt: skip
_BOTH = {
    "pools.prefill.workers": 0,
    "pools.decode.workers": 0,
    "pools.shared.workers": WORKERS,
    "pools.shared.cpus_per_worker": 0.1,
}
_SET_UPS: Mapping[str, Mapping[str, Any]] = {
    "pools_50": {"placement.disaggregation": "conditional"},
    "shared": {**_BOTH, "placement.disaggregation": "conditional"},
    HYBRID: {**_BOTH, "placement.disaggregation": "conditional", "placement.policy": "objectives"},
}


@dataclass(slots=True)
class Answer:
    """One request as its client saw it. token_s: seconds since it was sent, of each token. failed: why."""

    token_s: list[float] = field(default_factory=list)
    refused: bool = False
    failed: str = ""

    def keeps(self, ttft_s: float, tpot_ms: float) -> bool:
        if not self.token_s:
            return False
        later = len(self.token_s) - 1
        tpot_s = (self.token_s[-1] - self.token_s[0]) / later if later else 0.0
        return self.token_s[0] <= ttft_s and tpot_s <= tpot_ms / 1000


@dataclass(frozen=True, slots=True)
class Service:
    """One to start. cells: those that are judged on it; settings: of the configuration, by dotted key."""

    name: str
    cells: tuple[tuple[float, float], ...]
    settings: Mapping[str, Any]


def services(cells: Sequence[tuple[float, float]] = CELLS) -> list[Service]:
    """The objectives are nothing to the first two: one service of theirs tells all cells."""
    found = [Service(name, tuple(cells), {**SETTINGS, **_SET_UPS[name]}) for name in ("pools_50", "shared")]
    for ttft_s, tpot_ms in cells:
        objectives = {"objectives.ttft_s": ttft_s, "objectives.tpot_s": tpot_ms / 1000}
        found.append(Service(HYBRID, ((ttft_s, tpot_ms),), {**SETTINGS, **_SET_UPS[HYBRID], **objectives}))
    return found


Started = Callable[[Mapping[str, Any]], AbstractAsyncContextManager[AsyncClient]]


async def measure(
    started: Started, study: GridStudy = STUDY, progress: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """started: a client of a service with these settings, as a context. Raises what a start raises, and ConfigError
    where at a rate nobody is measured."""
    loads = [Load.of(study, rate) for rate in study.rates]
    runs: list[dict[str, Any]] = []
    failed = 0
    for service in services():
        progress(f"starting {service.name}")
        async with started(service.settings) as client:
            vocabulary = (await client.workers())[0].registration.model.vocabulary_size
            for load in loads:
                progress(f"{service.name}, {load.rate * WORKERS:g} requests/s, {_said(service.cells)}")
                found = await judged(client, vocabulary, service, study, load)
                runs += found
                failed += found[0]["failed"]
    return {
        "cost_model": study.cost_model,
        "workers": WORKERS,
        "seconds": study.seconds,
        "seed": study.seeds[0],
        "runs": runs,
        "failed": failed,
    }


@dataclass(frozen=True, slots=True)
class Load:
    """One rate, in requests a second for each worker. measured: which of the requests are, those after the warm-up."""

    rate: float
    block_tokens: int
    requests: tuple[SimRequest, ...]
    measured: tuple[bool, ...]

    @classmethod
    def of(cls, study: GridStudy, rate: float) -> "Load":
        """Raises ConfigError where nobody is measured."""
        try:
            workload = requests_of(study, WORKERS, rate, study.seeds[0])
            requests = tuple(workload)
        except (InvalidInputError, ValidationError):
            requests = ()
        measured = tuple(each.arrival_s >= study.seconds * WARM_UP for each in requests)
        if not any(measured):
            raise ConfigError(f"of {rate:g} in {study.seconds:g} s nobody is measured", field="--rates")
        return cls(rate, workload.block_tokens, requests, measured)

    def prompts(self, vocabulary: int, seed: int) -> list[Prompt]:
        """No two rates share a block: one does not find what the one before it has left in caches."""
        own = np.uint64(random.Random(f"grid/{seed}/{self.rate}").getrandbits(64))
        named = [replace(each, keys=block_names(each.keys ^ own)) for each in self.requests]
        return prompts_of(named, self.block_tokens, vocabulary, seed)


async def judged(
    client: AsyncClient, vocabulary: int, service: Service, study: GridStudy, load: Load
) -> list[dict[str, Any]]:
    """By each cell of the service."""
    foreign = ForeignLoad()
    answers = await _answered(client, load.prompts(vocabulary, study.seeds[0]))
    taken = foreign.cores()
    measured = [answer for answer, counts in zip(answers, load.measured, strict=True) if counts]
    simulated = _simulated(study, service, load.rate)
    return [
        {
            "set_up": service.name,
            "requests_per_s": load.rate * WORKERS,
            "ttft_s": ttft_s,
            "tpot_ms": tpot_ms,
            "measured": round(sum(each.keeps(ttft_s, tpot_ms) for each in measured) / len(measured), 4),
            "simulated": round(simulated[place], 4),
            "requests": len(measured),
            "refused": sum(each.refused for each in measured),
            "failed": sum(bool(each.failed) for each in measured),
            "foreign_cores": round(taken, 2),
        }
        for place, (ttft_s, tpot_ms) in enumerate(service.cells)
    ]


def _simulated(study: GridStudy, service: Service, rate: float) -> list[float]:
    """By cell."""
    figures = simulate(study, service.name, WORKERS, rate, study.seeds[0], service.cells[0])
    if service.name == HYBRID:
        return [figures.attainment]
    return [figures.attained_of[study.cells.index(cell)] / figures.measured for cell in service.cells]


async def _answered(client: AsyncClient, prompts: Sequence[Prompt]) -> list[Answer]:
    """Each at its time, whatever has become of those before."""
    began_s = monotonic_s()

    async def at_its_time(prompt: Prompt) -> Answer:
        await asyncio.sleep(max(0.0, began_s + prompt.at_s - monotonic_s()))
        return await answered(client, prompt)

    with Ungrouped():
        async with TaskGroup() as group:
            tasks = [group.create_task(at_its_time(prompt)) for prompt in prompts]
    return [task.result() for task in tasks]


async def answered(client: AsyncClient, prompt: Prompt) -> Answer:
    """A failure is an outcome of its own."""
    answer, sent_s = Answer(), monotonic_s()
    wishes = {"max_tokens": prompt.output_tokens, "temperature": 0.0, "ignore_eos": True}
    pieces: AsyncIterator[Any] = client.stream(token_prompt(list(prompt.token_ids)), **wishes)
    try:
        async with aclosing(pieces):  # type: ignore[type-var]
            async for piece in pieces:
                if not isinstance(piece, generation.Completion):
                    answer.token_s += [monotonic_s() - sent_s] * len(piece.token_ids)
    except RachisError as error:
        answer.refused = error.status == "RESOURCE_EXHAUSTED"
        answer.failed = "" if answer.refused else str(error)
        answer.token_s = []
    return answer


def _said(cells: Sequence[tuple[float, float]]) -> str:
    return "all cells" if len(cells) > 1 else f"{cells[0][0]:g} s by {cells[0][1]:g} ms"
