"""`rachis bench overhead`: what router and hand-off add over the same engines called directly."""

from pathlib import Path
from typing import Any

import psutil
from rachis import AsyncClient
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.overhead import CONCURRENCIES, ROUTER_FACTOR, WARM_UP, OverheadBenchmark
from cluster_configs.loading import LoadedConfig
from cluster_wire.secret import read_secret
from command_line.output import err, out, print_json, print_table
from command_line.own_service import Target, target_service
from control_plane.service.state import StateFile

_HEADLINE = ("router_p50_ms", "router_p99_ms", "handoff_p50_ms", "handoff_p99_ms")


async def bench_overhead(loaded: LoadedConfig, state_file: StateFile, requests: int, *, as_json: bool) -> None:
    """Always on an own service, so that its processes can be counted and nobody else's requests are in the figures."""
    secret_file = loaded.config.security.secret_path
    secret = read_secret(Path(secret_file)) if secret_file is not None else None
    async with (
        target_service(None, state_file, loaded, always_own=True) as target,
        AsyncClient(target.address) as cluster,
    ):
        with Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=err,
            # Drawing takes the interpreter from the client that is being timed.
            refresh_per_second=1, disable=not err.is_terminal,
        ) as progress:  # fmt: skip
            task = progress.add_task(
                "requests", total=2 * (1 + ROUTER_FACTOR) * (WARM_UP + len(CONCURRENCIES) * requests)
            )
            on_done = lambda: progress.advance(task)  # noqa: E731
            measured = await OverheadBenchmark(cluster, on_done, secret).run(requests)
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


def _resident_bytes(target: Target) -> int:
    """Resident memory of the service's process and everything under it."""
    root = psutil.Process(target.pid)
    return sum(process.memory_info().rss for process in [root, *root.children(recursive=True)])
