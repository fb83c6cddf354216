"""`rachis bench soak`: many requests and sessions, and what router and workers hold before and after them."""

from dataclasses import asdict

from rich.table import Table

from benchmarks import soak
from cluster_configs.loading import LoadedConfig
from cluster_core.errors import StartError
from command_line.output import err, out, print_json
from command_line.own_service import target_service
from command_line.progress import progress_reports
from control_plane.service.state import StateFile

_MIB = 1 << 20


async def bench_soak(
    loaded: LoadedConfig, state_file: StateFile, requests: int, sessions: int, *, as_json: bool
) -> None:
    async with target_service(None, state_file, loaded, always_own=True) as target:
        if target.pid is None:
            raise StartError("an own service has a process")
        with progress_reports() as progress:
            progress.phase("requests and sessions")
            progress.total(requests + sessions)
            report = await soak.measure(target.address, target.pid, requests, sessions, progress.done)
    if as_json:
        print_json({**asdict(report), "growth": report.growth()})
        return
    table = Table("process", "memory MiB", "descriptors", "threads", "tasks", title="before and after")
    for name, after in report.after.items():
        before = report.before[name]
        table.add_row(
            name,
            f"{before.resident_bytes / _MIB:.0f} {after.resident_bytes / _MIB:.0f}",
            f"{before.descriptors} {after.descriptors}",
            f"{before.threads} {after.threads}",
            "" if after.tasks is None else f"{before.tasks} {after.tasks}",
        )
    out.print(table)
    told = ", ".join(f"{count} {status}" for status, count in sorted(report.statuses.items())) or "none"
    err.print(f"{report.left} clients left before their answer; of the others {told} failed")
