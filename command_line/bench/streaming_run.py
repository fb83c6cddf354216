"""`rachis bench streaming`: TTFT of streamed prompts by policy, against waiting for the whole context."""

from collections.abc import Sequence
from typing import Any

from benchmarks.measuring_process import measure_in_process
from cluster_configs.loading import LoadedConfig
from cluster_core.errors import ConfigError
from command_line.bench.foreign_cores import warn_of_foreign_cores
from command_line.output import out, print_json, print_table
from command_line.progress import progress_reports
from prefill_worker.policies import POLICIES

_SHARES = ("p50", "p90", "p95", "p99")
_MOST_LOAD = 10.0


async def bench_streaming(
    loaded: LoadedConfig,
    workload: dict[str, Any],
    policies: list[str],
    loads: list[float],
    rounds: int,
    *,
    as_json: bool,
) -> None:
    config = loaded.config.model_dump(mode="json")
    arguments = {"config": config, "workload": workload, "policies": policies, "loads": loads, "rounds": rounds}
    with progress_reports() as reports:
        result = await measure_in_process("benchmarks.streaming", arguments, reports)
    if as_json:
        print_json(result)
    elif loads:
        for row in result["loads"]:
            _print_runs(row, f", at a load of {row['load']:g}")
        out.print(f"a load of 1: {result['capacity_per_s']:.2f} sessions/s, as measured")
    else:
        _print_runs(result)


def load_shares(given: str | None) -> list[float]:
    """With commas between; None: none. Raises ConfigError."""
    if given is None:
        return []
    try:
        loads = [float(each) for each in given.split(",")]
    except ValueError:
        loads = []
    if not loads or not all(0 < each <= _MOST_LOAD for each in loads):
        raise ConfigError(
            f"must be numbers above 0 and at most {_MOST_LOAD:g}, with commas between, got {given}", field="--load"
        )
    return loads


def _print_runs(result: dict[str, Any], at: str = "") -> None:
    runs = result["policies"]
    print_table(
        f"TTFT after finish (ms){at}, and how many times faster than ns",
        ("", *_SHARES, *(f"x {each}" for each in _SHARES)),
        [(name, *_shares(figures["ttft_after_finish_ms"], 1), *_shares(figures["speedup_vs_ns"], 2))
         for name, figures in runs.items()],
    )  # fmt: skip
    print_table(
        "TTFT from open (ms), completion against ns, sessions preempted, tokens invalidated",
        ("", *_SHARES, "completion", "swapped", "recomputed", "invalidated"),
        [(name, *_shares(figures["ttft_from_open_ms"], 0), *_rest(figures)) for name, figures in runs.items()],
    )
    warn_of_foreign_cores(figures["foreign_cores"] for figures in runs.values())
    drawn = result["workload"]
    out.print(
        f"{drawn['sessions']} sessions, {drawn['inputs']} inputs, {drawn['all_prompt_tokens']} prompt tokens; "
        f"the last input after {drawn['last_input_s']} s"
    )


def policy_names(given: Sequence[str]) -> list[str]:
    """With commas or one by one; none given: all. Raises ConfigError."""
    names = [name.strip() for each in given or POLICIES for name in each.split(",") if name.strip()]
    unknown = next((name for name in names if name not in POLICIES), None)
    if unknown is not None:
        raise ConfigError(f"must be of {', '.join(POLICIES)}, got {unknown}", field="--policy")
    return names


def _shares(values: dict[str, float], digits: int) -> list[str]:
    return [f"{values[share]:.{digits}f}" for share in _SHARES]


def _rest(figures: dict[str, Any]) -> tuple[str, ...]:
    preemptions = figures["preemptions"]
    return (
        f"{figures['completion_ratio_vs_ns']:.3f}",
        str(preemptions["swap"]),
        str(preemptions["recompute"]),
        str(figures["tokens_invalidated"]),
    )
