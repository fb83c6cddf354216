"""Tiers of cached prefixes on a real engine: the measurement behind `rachis bench tiers`.

One workload, whose shared prefixes do not fit the device, against a fresh engine for each of

    stock             plain vLLM with its prefix caching: no connector, no scheduler of ours
    copy_everything   our tiers as a plain second level: least recently used, every block copied, nothing promoted
    rachis            our tiers as configured

All have as many device blocks, the last two as much host memory; they take turns in one process, `rounds` times, each
warmed up with prompts of another seed. TTFT is from sending a prompt to its first token; a request's is the median of
its rounds, and so is the time in all. Counts are of all rounds together: what was not computed is what the engine says
of each request (`cached_tokens`), copies are what its tiers count. Greedy answers must be those of `stock`, token by
token: else there are no figures. `foreign_cores` is the most that other processes took of the machine in a round.
"""

import gc
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from benchmarks.closed_loop import Answer, closed_loop
from benchmarks.measuring_process import Reports, foreign_cpu_s, in_process_engine, run_measurement
from benchmarks.tiers_workload import (
    ANSWER_TOKENS,
    TiersWorkload,
    default_device_blocks,
    longest_tokens,
    prompts_of,
    shared_blocks,
    wrong_tokens,
)
from cluster_configs.schema import RachisConfig
from cluster_core.clock import monotonic_s
from cluster_core.engine import Engine
from cluster_core.engine_reports import EngineInfo, TierReport
from cluster_core.errors import UnavailableError
from cluster_sim.workloads.traces import Trace
from worker_runtime.engine_settings import EngineRole

STOCK, COPY_EVERYTHING, RACHIS = "stock", "copy_everything", "rachis"
# What each changes in the section `tiers`; `stock` has no use for it.
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    STOCK: {},
    COPY_EVERYTHING: {"eviction": "lru", "admission": "everything", "promotion": False},
    RACHIS: {},
}
_SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_WARM_UP_REQUESTS = 50


@dataclass(frozen=True, slots=True)
class Run:
    """One round of one variant."""

    # In the order of the prompts.
    answers: Sequence[Answer]
    took_s: float
    foreign_cores: float
    # What the tiers had counted before and after; None where there are none.
    before: TierReport | None = None
    after: TierReport | None = None


async def bench_tiers(arguments: dict[str, Any], reports: Reports) -> dict[str, Any]:
    """{"variants", "workload", "samples_ms"} for `RachisConfig` "config", whose host memory counts, `TiersWorkload`
    "workload" and "device_blocks"; None takes what the workload asks for."""
    config = RachisConfig.model_validate(arguments["config"])
    workload = TiersWorkload(**arguments["workload"])
    trace = workload.trace(config.engine.block_size_tokens)
    device_blocks = arguments["device_blocks"] or default_device_blocks(trace, workload.concurrency)
    reports.total(workload.rounds * len(VARIANTS) * workload.requests)
    runs: dict[str, list[Run]] = {name: [] for name in VARIANTS}
    for _ in range(workload.rounds):
        for name, rounds in runs.items():
            async with in_process_engine(*_engine(config, name, device_blocks), reports) as (engine, info):
                rounds.append(await _run(engine, info, name, workload, trace, reports))
            require_identical(name, rounds[-1], runs[STOCK][0])
    return {
        "variants": compare(runs),
        "workload": asdict(workload) | describe(trace, config, device_blocks, runs[RACHIS][0]),
        "samples_ms": {name: [round(ms, 3) for ms in ttft_ms(rounds)] for name, rounds in runs.items()},
    }


def _engine(config: RachisConfig, variant: str, device_blocks: int) -> tuple[RachisConfig, EngineRole]:
    # vLLM keeps one block for itself, and wants room for the longest prompt that it may be sent.
    longest = min(config.engine.max_model_len, device_blocks * config.engine.block_size_tokens)
    engine = config.engine.model_copy(update={"kv_blocks": device_blocks + 1, "max_model_len": longest})
    tiers = config.tiers.model_copy(update=VARIANTS[variant])
    role = EngineRole.ALONE if variant == STOCK else EngineRole.PREFILL
    return config.model_copy(update={"engine": engine, "tiers": tiers}), role


async def _run(
    engine: Engine, info: EngineInfo, name: str, workload: TiersWorkload, trace: Trace, reports: Reports
) -> Run:
    reports.phase(f"{name}: warming up")
    others = replace(workload, requests=min(workload.requests, _WARM_UP_REQUESTS), seed=workload.seed + 1)
    strangers = prompts_of(others.trace(trace.block_tokens), info.vocabulary_size, others.seed)
    await closed_loop(engine, strangers, ANSWER_TOKENS, workload.concurrency)
    prompts = prompts_of(trace, info.vocabulary_size, workload.seed)
    gc.collect()
    reports.phase(name)
    before, foreign_s, began_s = engine.status().tiers, foreign_cpu_s(), monotonic_s()
    answers = await closed_loop(engine, prompts, ANSWER_TOKENS, workload.concurrency, reports.done)
    took_s = monotonic_s() - began_s
    return Run(answers, took_s, (foreign_cpu_s() - foreign_s) / took_s, before, engine.status().tiers)


def require_identical(name: str, run: Run, stock: Run) -> None:
    """Raises UnavailableError when a variant's answers are not those of `stock`."""
    expected = [each.tokens for each in stock.answers]
    wrong = wrong_tokens(expected, [each.tokens for each in run.answers])
    if wrong:
        raise UnavailableError(f"wrong tokens: {wrong} of {sum(map(len, expected))} in {name}, against {STOCK}")


def ttft_ms(rounds: Sequence[Run]) -> list[float]:
    """Of each request, the median of its rounds."""
    samples = [[each.ttft_ms for each in run.answers] for run in rounds]
    return [float(each) for each in np.median(samples, axis=0)]


def compare(runs: Mapping[str, Sequence[Run]]) -> dict[str, dict[str, Any]]:
    """Each variant's figures; then its own over those of the two it is compared with, None over nothing."""
    table = {name: _figures(rounds) for name, rounds in runs.items()}
    for figures in table.values():
        figures["vs_stock"] = _ratios(figures, table[STOCK])
        figures["vs_copy_everything"] = _ratios(figures, table[COPY_EVERYTHING])
    return table


def _figures(rounds: Sequence[Run]) -> dict[str, Any]:
    samples_ms = ttft_ms(rounds)
    prompt_tokens = sum(each.prompt_tokens for run in rounds for each in run.answers)
    hit_tokens = sum(each.cached_tokens for run in rounds for each in run.answers)
    counted = _counted(rounds)
    return {
        "ttft_ms": {"mean": round(float(np.mean(samples_ms)), 3)}
        | {name: round(float(np.quantile(samples_ms, share)), 3) for name, share in _SHARES.items()},
        "total_s": round(float(np.median([run.took_s for run in rounds])), 3),
        "prompt_tokens": prompt_tokens,
        "tokens_computed": prompt_tokens - hit_tokens,
        "hit_ratio": round(hit_tokens / prompt_tokens, 4),
        "device_hit_tokens": hit_tokens - counted["host_hit_tokens"],
        **counted,
        "copied_bytes": counted["copied_out_bytes"] + counted["copied_back_bytes"],
        "foreign_cores": round(max(run.foreign_cores for run in rounds), 2),
    }


_COUNTED = (
    "host_hit_tokens", "copied_out_blocks", "copied_out_bytes", "copy_out_s", "copied_back_blocks", "copied_back_bytes",
    "copy_back_s", "failed_copy_blocks", "promoted_blocks", "promoted_used_blocks", "promoted_wasted_blocks",
)  # fmt: skip


def _counted(rounds: Sequence[Run]) -> dict[str, Any]:
    """What the tiers have counted during the rounds; zeros where there are none."""
    counted: dict[str, Any] = dict.fromkeys(_COUNTED, 0)
    refused: Counter[str] = Counter()
    for run in rounds:
        if run.before is not None and run.after is not None:
            for name in _COUNTED:
                counted[name] += getattr(run.after, name) - getattr(run.before, name)
            refused.update(run.after.refused_offers)
            refused.subtract(run.before.refused_offers)
    return {name: round(value, 4) for name, value in counted.items()} | {"refused_offers": dict(refused)}


def _ratios(figures: Mapping[str, Any], baseline: Mapping[str, Any]) -> dict[str, float | None]:
    ttft = {f"ttft_{name}": _ratio(ms, baseline["ttft_ms"][name]) for name, ms in figures["ttft_ms"].items()}
    others = ("total_s", "tokens_computed", "copied_bytes")
    return ttft | {name: _ratio(figures[name], baseline[name]) for name in others}


def _ratio(value: float, baseline: float) -> float | None:
    return round(value / baseline, 4) if baseline else None


def describe(trace: Trace, config: RachisConfig, device_blocks: int, with_tiers: Run) -> dict[str, Any]:
    """What the workload asks for, and of what."""
    return {
        "prompt_tokens": sum(request.input_tokens for request in trace),
        "answer_tokens": ANSWER_TOKENS,
        "shared_blocks": shared_blocks(trace),
        "longest_tokens": longest_tokens(trace),
        "device_blocks": device_blocks,
        "host_blocks": with_tiers.after.host_capacity_blocks if with_tiers.after is not None else 0,
        "block_size_tokens": trace.block_tokens,
        "model": config.model.served_name,
        "device": config.engine.device,
        "dtype": config.engine.dtype,
        "threads": config.engine.threads,
        "tiers": config.tiers.model_dump(mode="json"),
    }


if __name__ == "__main__":
    run_measurement(bench_tiers)
