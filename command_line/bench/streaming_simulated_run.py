"""`rachis bench streaming --simulated`: TTFT of streamed prompts over the load, in simulated time."""

from typing import Any

from benchmarks.measuring_process import measure_in_process
from command_line.output import out, print_json, print_table
from command_line.progress import progress_reports

POLICIES_SHOWN = ("default", "fcfs", "default_vllm")
_DEFAULT_LOADS = (0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2)
_SHARES = ("p50", "p90", "p99")


async def bench_streaming_simulated(
    workload: dict[str, Any], policies: list[str], loads: list[float], *, as_json: bool
) -> None:
    arguments = {**workload, "policies": policies, "loads": loads or list(_DEFAULT_LOADS)}
    with progress_reports() as reports:
        result = await measure_in_process("benchmarks.streaming_simulated", arguments, reports)
    if as_json:
        print_json(result)
        return
    print_table(
        "TTFT after finish (s), how many times faster than ns, tokens computed and invalidated",
        ("load", "", *_SHARES, *(f"x {each}" for each in _SHARES), "computed", "invalidated"),
        [_row(row["load"], name, figures) for row in result["loads"] for name, figures in row["policies"].items()],
    )
    drawn = result["workload"]
    out.print(
        f"{drawn['sessions']} sessions, mode {drawn['mode']}, seed {drawn['seed']}; "
        f"a load of 1: {result['saturation_per_s']:.2f} sessions/s on {drawn['cost_model']}"
    )


def _row(load: float, name: str, figures: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"{load:g}",
        name,
        *(f"{figures['ttft_after_finish_s'][share]:.3f}" for share in _SHARES),
        *(f"{figures['speedup_vs_ns'][share]:.2f}" for share in _SHARES),
        f"{figures['computed_tokens']:,}",
        f"{figures['invalidated_tokens']:,}",
    )
