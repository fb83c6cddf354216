"""Policies of a prefix cache against each other over one trace: the measurement behind `rachis bench prefix-cache`.

Names: those of the recipes, and `belady`, the offline optimum over one tier as large as both, which copies nothing.
`lru` always runs: hit ratios are compared with its, and what is copied with its too, since it copies everything.
Recipes that come to the same, as without host memory, are replayed once. A trace on disk is read again for each replay,
so that memory is bounded by what is cached and remembered; for `belady` it is held whole, 8 bytes a block reference.
"""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from benchmarks.prefix_cache.replay import RECIPES, HitRatios, Recipe, optimum, replay
from cluster_core.clock import monotonic_s
from cluster_core.errors import InvalidInputError
from cluster_sim.workloads.traces import Trace, TraceFile

BASELINE = "lru"
OPTIMUM = "belady"
ALL = "all"
POLICIES = (*RECIPES, OPTIMUM)
# 32 layers x 8 KV heads x 128 numbers x 2 (keys and values) x 2 bytes: Llama-3.1-8B in bf16.
LLAMA_8B_KV_BYTES_PER_TOKEN = 131_072


class Reports(Protocol):
    """Told of what runs now, and of requests done."""

    def phase(self, text: str) -> None: ...

    def done(self, steps: int = 1) -> None: ...


@dataclass(frozen=True, slots=True)
class TraceFacts:
    """What a trace asks for."""

    name: str
    block_tokens: int
    requests: int
    input_tokens: int
    blocks: int
    distinct_blocks: int
    # Over tokens, with a cache without end.
    ideal_hit_ratio: float


@dataclass(frozen=True, slots=True)
class Capacities:
    """Of the two tiers, in blocks."""

    device_blocks: int
    host_blocks: int


@dataclass(frozen=True, slots=True)
class Run:
    ratios: HitRatios
    took_s: float


def policy_names(given: Iterable[str]) -> list[str]:
    """What to run: the baseline, then the names as given, with commas or one by one, each once.

    None given: all. Raises InvalidInputError for an unknown name, with the nearest one, and for commas without names.
    """
    given = list(given) or [ALL]
    names = [name.strip() for each in given for name in each.split(",") if name.strip()]
    if not names:
        raise InvalidInputError(
            f"must be of {', '.join(POLICIES)}, or {ALL}, got {','.join(given)!r}", field="--policy"
        )
    for name in names:
        if name not in (*POLICIES, ALL):
            raise InvalidInputError(
                f"there is no {name!r}, the nearest is {_nearest(name)!r}; all are {', '.join(POLICIES)}, or {ALL}",
                field="--policy",
            )
    return list(dict.fromkeys([BASELINE, *(POLICIES if ALL in names else names)]))


def _nearest(name: str) -> str:
    by_folded = {each.casefold(): each for each in (*POLICIES, ALL)}
    return by_folded[difflib.get_close_matches(name.casefold(), by_folded, n=1, cutoff=0.0)[0]]


def facts(trace: Trace | TraceFile) -> TraceFacts:
    """Reads all of it once: what is wrong with a file is said before anything is replayed. Raises TraceError."""
    seen: set[int] = set()
    requests = input_tokens = blocks = hit_tokens = 0
    for request in trace:
        requests += 1
        input_tokens += request.input_tokens
        blocks += len(request.hashes)
        hits = sum(map(seen.__contains__, request.hashes))
        hit_tokens += min(hits * trace.block_tokens, request.input_tokens)
        seen.update(request.hashes)
    return TraceFacts(
        trace.name, trace.block_tokens, requests, input_tokens, blocks, len(seen), hit_tokens / max(1, input_tokens)
    )


def number_of_replays(names: Iterable[str], capacities: Iterable[Capacities]) -> int:
    names = list(names)
    return sum(len({_what_runs(name, each) for name in names}) for each in capacities)


def _what_runs(name: str, capacities: Capacities) -> Recipe | str:
    """Equal for names that come to the same."""
    return name if name == OPTIMUM else RECIPES[name].with_host_of(capacities.host_blocks)


def compare(
    trace: Trace | TraceFile, names: Iterable[str], capacities: Capacities, requests: int, reports: Reports
) -> dict[str, Run]:
    """Each name's run, in the order given. requests: how many the trace has."""
    runs: dict[Recipe | str, Run] = {}
    by_name: dict[str, Run] = {}
    for name in names:
        what = _what_runs(name, capacities)
        if what not in runs:
            reports.phase(name)
            runs[what] = _timed(trace, name, capacities, requests, reports)
        by_name[name] = runs[what]
    return by_name


def _timed(trace: Trace | TraceFile, name: str, capacities: Capacities, requests: int, reports: Reports) -> Run:
    began_s = monotonic_s()
    if name == OPTIMUM:
        whole = Trace(trace.name, trace.block_tokens, tuple(trace))
        ratios = optimum(whole, capacities.device_blocks + capacities.host_blocks)
        reports.done(requests)
    else:
        ratios = replay(trace, name, capacities.device_blocks, capacities.host_blocks, reports.done)
    return Run(ratios, monotonic_s() - began_s)


def figures(runs: Mapping[str, Run], block_bytes: int) -> dict[str, dict[str, Any]]:
    """By policy, for JSON. Ratios to the baseline are None where the baseline has nothing."""
    baseline = runs[BASELINE].ratios
    return {
        name: {
            "hit_ratio": round(run.ratios.hit_ratio, 5),
            "device_hit_ratio": round(run.ratios.device_hit_ratio, 5),
            "host_hit_ratio": round(run.ratios.host_hit_ratio, 5),
            "hit_ratio_vs_lru": _ratio(run.ratios.hit_ratio, baseline.hit_ratio),
            "blocks_copied": run.ratios.blocks_copied,
            "blocks_copied_out": run.ratios.blocks_copied_out,
            "blocks_copied_back": run.ratios.blocks_copied_back,
            "blocks_promoted": run.ratios.blocks_promoted,
            "bytes_copied": run.ratios.blocks_copied * block_bytes,
            "bytes_vs_copy_everything": _ratio(run.ratios.blocks_copied, baseline.blocks_copied),
            "took_s": round(run.took_s, 2),
        }
        for name, run in runs.items()
    }


def _ratio(value: float, baseline: float) -> float | None:
    return round(value / baseline, 4) if baseline else None
