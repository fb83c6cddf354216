"""`rachis bench`: measured comparisons, each on a service or engine of its own."""

from collections.abc import Iterable
from typing import Any

import psutil
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.measuring_process import measure_in_process
from benchmarks.ordering import SIZES, ordering_table
from benchmarks.overhead import CONCURRENCIES, ROUTER_FACTOR, WARM_UP, OverheadBenchmark
from cluster_configs.loading import LoadedConfig
from command_line.output import err, out, print_json, print_table
from command_line.own_service import Target, target_service
from command_line.profile import progress_reports
from control_plane.client import RachisClient
from control_plane.service.state import StateFile
from prefill_worker.policies import POLICIES


async def bench_overhead(loaded: LoadedConfig, state_file: StateFile, requests: int, *, as_json: bool) -> None:
    """Always on an own service, so that its processes can be counted and nobody else's requests are in the figures."""
    async with (
        target_service(None, state_file, loaded, always_own=True) as target,
        RachisClient(target.address) as cluster,
    ):
        with Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=err,
            # Drawing takes the interpreter from the client that is being timed.
            refresh_per_second=1, disable=not err.is_terminal,
        ) as progress:  # fmt: skip
            task = progress.add_task(
                "requests", total=2 * (1 + ROUTER_FACTOR) * (WARM_UP + len(CONCURRENCIES) * requests)
            )
            measured = await OverheadBenchmark(cluster, lambda: progress.advance(task)).run(requests)
        status = await cluster.router_status()
        resident_mib = _resident_bytes(target) >> 20
    by_concurrency = {str(each): result.table() for each, result in measured.items()}
    result: dict[str, Any] = {
        **{name: by_concurrency["1"][name] for name in _HEADLINE},
        "cores_per_100_rps": by_concurrency[str(CONCURRENCIES[-1])]["cores_per_100_rps"],
        "router_own_p50_ms": round(status.overhead_p50_ms, 3),
        "router_own_p99_ms": round(status.overhead_p99_ms, 3),
        "start_s": target.start_s,
        "resident_mib": resident_mib,
        "requests": requests,
        "by_concurrency": by_concurrency,
    }
    if as_json:
        print_json(result)
        return
    names = list(by_concurrency["1"])
    print_table(
        "", ("", *(f"concurrency {each}" for each in by_concurrency)),
        [(name, *(table[name] for table in by_concurrency.values())) for name in names],
    )  # fmt: skip
    out.print(
        f"the router's own time: p50 {result['router_own_p50_ms']} ms, p99 {result['router_own_p99_ms']} ms; "
        f"service up in {target.start_s:.1f} s, {resident_mib} MiB resident"
    )


_HEADLINE = ("router_p50_ms", "router_p99_ms", "handoff_p50_ms", "handoff_p99_ms")


def _resident_bytes(target: Target) -> int:
    """Resident memory of the service's process and everything under it."""
    root = psutil.Process(target.pid)
    return sum(process.memory_info().rss for process in [root, *root.children(recursive=True)])


def bench_ordering(*, as_json: bool) -> None:
    with progress_reports() as reports:
        reports.total(len(POLICIES) * len(SIZES))
        table = ordering_table(reports.done)
    if as_json:
        by_policy = {
            name: {
                str(size): {"p50_us": round(each.p50_us, 2), "p99_us": round(each.p99_us, 2), "runs": each.runs}
                for size, each in by_size.items()
            }
            for name, by_size in table.items()
        }
        print_json({"policies": by_policy})
        return
    rows = [
        (name, *(f"{each.p50_us:.1f} / {each.p99_us:.1f}" for each in by_size.values()))
        for name, by_size in table.items()
    ]
    print_table("us to order so many sessions: P50 / P99", ("", *map(str, SIZES)), rows)


async def bench_streaming(
    loaded: LoadedConfig, workload: dict[str, Any], policies: list[str], *, as_json: bool
) -> None:
    arguments = {"config": loaded.config.model_dump(mode="json"), "workload": workload, "policies": policies}
    with progress_reports() as reports:
        result = await measure_in_process("benchmarks.streaming", arguments, reports)
    if as_json:
        print_json(result)
        return
    runs = result["policies"]
    print_table(
        "TTFT after finish (ms), and how many times faster than ns", ("", *_SHARES, *(f"x {each}" for each in _SHARES)),
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


def warn_of_foreign_cores(by_run: Iterable[float]) -> None:
    """Where other processes were busy during a run."""
    most = max(by_run)
    if most > _MOST_FOREIGN_CORES:
        err.print(f"[yellow]other processes took up to {most} cores meanwhile: the runs may not compare[/yellow]")


# Of the machine, during one run. Half a core taken from an engine of one thread makes everybody's tail longer.
_MOST_FOREIGN_CORES = 0.3
_SHARES = ("p50", "p95", "p99")


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
