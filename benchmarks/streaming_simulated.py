"""Streaming sessions against waiting for the whole context over the load: `rachis bench streaming --simulated`.

In simulated time with the real schedulers, on the model of two H200 and the paper's settings
(`papers.stream2llm_replay`): a seed gives the same figures on every machine. A load of 1 is the rate of sessions at
which an engine that waits for whole contexts computes all the time, found by a run in which sessions come far faster
than that. TTFT counts from `finish`.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from benchmarks.measuring_process import Reports, run_measurement
from benchmarks.papers.stream2llm_replay import COST_MODEL, Run, Variant, replay
from cluster_core.engine_jobs import SessionMode
from cluster_sim.workloads.streaming import WorkloadSpec

NON_STREAMING = "ns"
SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
# At which no engine of this model is ever idle until the last session has come.
_FLOOD_PER_S = 1000.0


async def bench_streaming_simulated(arguments: dict[str, Any], reports: Reports) -> dict[str, Any]:
    """{"saturation_per_s", "loads", "workload"} for "mode", "sessions", "seed", "policies", "loads"."""
    mode = SessionMode(arguments["mode"])
    given = {"mode": mode, "sessions": arguments["sessions"], "seed": arguments["seed"]}
    loads, policies = arguments["loads"], arguments["policies"]
    reports.total(1 + len(loads) * (1 + len(policies)))
    # As in the paper's runs: a crawl of more pages has more tokens.
    flood = WorkloadSpec(**given, rate_per_s=_FLOOD_PER_S, coupled=mode is SessionMode.APPEND)
    saturation_per_s = saturation(replay(flood, Variant(None)))
    reports.done()
    rows = []
    for load in loads:
        spec = replace(flood, rate_per_s=load * saturation_per_s)
        runs = {}
        for name in (NON_STREAMING, *policies):
            reports.phase(f"load {load:g}: {name}")
            runs[name] = replay(spec, Variant(None if name == NON_STREAMING else name))
            reports.done()
        rows.append({"load": load, "rate_per_s": round(spec.rate_per_s, 3), "policies": compared(runs)})
    workload = {**given, "mode": mode.value, "cost_model": COST_MODEL}
    return {"saturation_per_s": round(saturation_per_s, 3), "loads": rows, "workload": workload}


def saturation(flooded: Run) -> float:
    """Sessions a second that an engine carries which got all at once."""
    return len(flooded.ttft_s) / flooded.busy_s


def compared(runs: dict[str, Run]) -> dict[str, dict[str, Any]]:
    """Each run's figures, and how many times earlier than in `ns` first tokens came."""
    waited = runs[NON_STREAMING]
    return {
        name: {
            "ttft_after_finish_s": _rounded((share, run.quantile(part)) for share, part in SHARES.items()),
            "speedup_vs_ns": _rounded(
                (share, waited.quantile(part) / run.quantile(part)) for share, part in SHARES.items()
            ),
            "mean_ttft_after_finish_s": round(sum(run.ttft_s) / len(run.ttft_s), 4),
            "busy_share": round(run.busy_share, 4),
            "computed_tokens": run.computed_tokens,
            "invalidated_tokens": run.invalidated_tokens,
            "preemptions": run.preemptions,
        }
        for name, run in runs.items()
    }


def _rounded(values: Iterable[tuple[str, float]]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in values}


if __name__ == "__main__":
    run_measurement(bench_streaming_simulated)
