"""`rachis bench hostile`: one client does its worst, and the others are timed."""

from dataclasses import asdict

from benchmarks import hostile
from cluster_configs.loading import LoadedConfig
from cluster_core.errors import StartError
from command_line.output import err, out, print_json
from command_line.own_service import target_service
from control_plane.service.state import StateFile


async def bench_hostile(loaded: LoadedConfig, state_file: StateFile, seconds: float, *, as_json: bool) -> None:
    async with target_service(None, state_file, loaded, always_own=True) as target:
        if target.pid is None:
            raise StartError("an own service has a process")
        err.print(f"one client does its worst for {seconds:g} s")
        report = await hostile.measure(target.address, target.pid, seconds)
    if as_json:
        print_json(asdict(report))
        return
    out.print(
        f"its own work held the router's loop up for at most {report.loop_stall_p99_ms:g} ms 99 times of 100, "
        f"{report.loop_stall_longest_ms:g} ms ever; with waits for a processor {report.loop_late_p99_ms:g} ms"
    )
    out.print(
        f"others: P50 {report.quiet_p50_ms:.0f} ms without it, {report.hostile_p50_ms:.0f} ms with it "
        f"({report.others_p50_ratio:.2f} times), {report.failed} of {report.requests + report.failed} failed"
    )
    out.print(f"memory of the router afterwards: {report.memory_after_ratio:.2f} of before")
