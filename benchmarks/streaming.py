"""Streaming sessions against waiting for the whole context: the measurement behind `rachis bench streaming`.

Source: Stream2LLM (arXiv:2604.16395), section 6. One trace is replayed against a fresh engine for each of

    ns             non-streaming: the whole prompt is sent when its last piece is there, vLLM's own scheduler
    default_vllm   streamed, in vLLM's own order
    any policy     streamed, in its order

All engines are prefill workers' (with connector and streaming scheduler, which leaves vLLM's schedule alone while no
session is open), in one process, one after the other. TTFT is reported both ways: after finish, which is the paper's
figure and from which `speedup_vs_ns` comes, and from open, which includes the retriever's time. `tokens_invalidated`
and `preemptions` are sums over the sessions' own records, so what stock vLLM preempts in `ns` is not in them.
`foreign_cores` is what other processes took of the machine during a run: where it differs, the runs do not compare.

Machines differ, so that a rate says little: a load is a share of what this engine computes. A load of 1 is the rate of
sessions at which it computes all the time where it waits for whole contexts: those of a run that sends all at once.
Near it a machine that is slower by a hundredth for a while is late by much more: of several rounds, every second one in
the other order, figures are of all sessions together.
"""

import gc
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from benchmarks.cost_profile import prompt_sizes
from benchmarks.measuring_process import Reports, foreign_cpu_s, in_process_engine, run_measurement
from benchmarks.streaming_replay import Replay, replay
from cluster_configs.schema import RachisConfig
from cluster_core.clock import monotonic_s
from cluster_core.engine import Engine
from cluster_core.engine_jobs import SessionMode
from cluster_core.engine_reports import EngineInfo
from cluster_sim.workloads.streaming import TimedInput, TracedSession, WorkloadSpec, draw_trace
from prefill_worker.policies import POLICIES
from worker_runtime.engine_settings import EngineRole

NON_STREAMING = "ns"
STREAMED_BASELINE = "default_vllm"
_SHARES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
_AT_ONCE_PER_S = 1e6


def names_of_runs(policies: Sequence[str]) -> list[str]:
    """Both baselines, then the other policies as given, each once."""
    return list(dict.fromkeys([NON_STREAMING, STREAMED_BASELINE, *policies]))


async def bench_streaming(arguments: dict[str, Any], reports: Reports) -> dict[str, Any]:
    """{"policies": ..., "workload": ...} for `RachisConfig` "config", "workload", "policies" and "rounds". With "loads"
    these for each, with "load", in {"capacity_per_s": ..., "loads": ...}."""
    config = RachisConfig.model_validate(arguments["config"])
    given = arguments["workload"]
    spec = WorkloadSpec(**{**given, "mode": SessionMode(given["mode"])})
    names, loads, rounds = names_of_runs(arguments["policies"]), arguments["loads"], arguments["rounds"]
    order = [name for number in range(rounds) for name in (names if number % 2 == 0 else reversed(names))]
    if not loads:
        reports.total(len(order) * spec.sessions)
        return await _compared(config, spec, order, reports)
    reports.total((1 + len(loads) * len(order)) * spec.sessions)
    # Without the retriever's time.
    flood = replace(spec, rate_per_s=_AT_ONCE_PER_S, time_scale=0.0)
    flooded, *_ = await _runs(config, flood, [NON_STREAMING], reports, "capacity: ")
    capacity_per_s = spec.sessions / flooded[NON_STREAMING].completion_s
    rows = []
    for load in loads:
        at = replace(spec, rate_per_s=load * capacity_per_s)
        rows.append({"load": load, **await _compared(config, at, order, reports, called=f"load {load:g}: ")})
    return {"capacity_per_s": round(capacity_per_s, 3), "loads": rows}


async def _compared(
    config: RachisConfig, spec: WorkloadSpec, order: Sequence[str], reports: Reports, called: str = ""
) -> dict[str, Any]:
    replays, foreign_cores, trace = await _runs(config, spec, order, reports, called)
    table = compare(replays)
    for name, cores in foreign_cores.items():
        table[name]["foreign_cores"] = round(cores, 2)
    return {"policies": table, "workload": {**asdict(spec), "mode": spec.mode.value, **describe(trace, config)}}


async def _runs(
    config: RachisConfig, spec: WorkloadSpec, order: Sequence[str], reports: Reports, called: str
) -> tuple[dict[str, Replay], dict[str, float], tuple[TracedSession, ...]]:
    """Of one trace, each with an engine of its own; those of one name together. called: before the names of phases."""
    replays: dict[str, Replay] = {}
    foreign_cores: dict[str, float] = {}
    trace: tuple[TracedSession, ...] = ()
    for name in order:
        policy = name if name in POLICIES else STREAMED_BASELINE
        streaming = config.streaming.model_copy(update={"policy": policy})
        run_config = config.model_copy(update={"streaming": streaming})
        async with in_process_engine(run_config, EngineRole.PREFILL, reports) as (engine, info):
            # The same for every engine, as these are.
            trace = trace or draw_trace(spec, info.vocabulary_size, info.max_model_len)
            reports.phase(f"{called}{name}: warming up")
            await _warm_up(engine, info)
            gc.collect()
            reports.phase(f"{called}{name}")
            before_s, began_s = foreign_cpu_s(), monotonic_s()
            run = await replay(engine, trace, reports.done, streamed=name != NON_STREAMING)
            cores = (foreign_cpu_s() - before_s) / (monotonic_s() - began_s)
            replays[name] = replays[name].and_also(run) if name in replays else run
            foreign_cores[name] = max(cores, foreign_cores.get(name, cores))
    return replays, foreign_cores, trace


def compare(replays: Mapping[str, Replay]) -> dict[str, dict[str, Any]]:
    """Each run's figures, and how it did against `ns`."""
    waited = replays[NON_STREAMING]
    waited_ms = _percentiles(each.ttft_after_finish_ms for each in waited.sessions)
    table: dict[str, dict[str, Any]] = {}
    for name, run in replays.items():
        after_finish_ms = _percentiles(each.ttft_after_finish_ms for each in run.sessions)
        records = [each.record for each in run.sessions if each.record is not None]
        table[name] = {
            # Of all rounds.
            "sessions": len(run.sessions),
            "ttft_after_finish_ms": _rounded(after_finish_ms),
            "ttft_from_open_ms": _rounded(_percentiles(each.ttft_from_open_ms for each in run.sessions)),
            "speedup_vs_ns": _rounded({share: waited_ms[share] / ms for share, ms in after_finish_ms.items()}),
            "completion_ratio_vs_ns": round(run.completion_s / waited.completion_s, 4),
            "completion_s": round(run.completion_s, 3),
            "preemptions": {
                "swap": sum(each.preemptions_swap for each in records),
                "recompute": sum(each.preemptions_recompute for each in records),
            },
            "tokens_invalidated": sum(each.tokens.invalidated_tokens for each in records),
        }
    return table


def describe(trace: Sequence[TracedSession], config: RachisConfig) -> dict[str, Any]:
    """What the trace asks of the engine, and what that has."""
    prompt_tokens = _percentiles(len(each.prompt) for each in trace)
    return {
        "prompt_tokens": {share: round(tokens) for share, tokens in prompt_tokens.items()},
        "all_prompt_tokens": sum(len(each.prompt) for each in trace),
        "inputs": sum(len(each.inputs) for each in trace),
        "last_input_s": round(max(each.finish_s for each in trace), 3),
        "model": config.model.served_name,
        "device": config.engine.device,
        "kv_blocks": config.engine.kv_blocks,
        "block_size_tokens": config.engine.block_size_tokens,
        "max_batched_tokens": config.engine.max_batched_tokens,
        "preemption": config.streaming.preemption,
        "host_gib": config.tiers.host_gib,
    }


async def _warm_up(engine: Engine, info: EngineInfo) -> None:
    """A session of each length, streamed and not: whatever is slower the first time is slow for nobody that counts."""
    rng = random.Random(info.max_model_len)
    for size in prompt_sizes(info.max_model_len):
        tokens = tuple(rng.choices(range(info.vocabulary_size), k=size))
        session = TracedSession(0.0, SessionMode.APPEND, tokens[:1], (TimedInput(0.0, tokens[1:-1]),), tokens[-1:])
        for streamed in (False, True):
            await replay(engine, [session], lambda: None, streamed=streamed)


def _percentiles(values: Iterable[float]) -> dict[str, float]:
    drawn = list(values)
    return {name: float(np.quantile(drawn, share)) for name, share in _SHARES.items()}


def _rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in values.items()}


if __name__ == "__main__":
    run_measurement(bench_streaming)
