"""`rachis bench migration`: kills, drains and restarts under answers, and what stands ready for them costs."""

from collections.abc import Callable
from dataclasses import asdict

from benchmarks import migration
from cluster_configs.loading import LoadedConfig
from command_line.output import err, out, print_json
from command_line.own_cluster import Places, own_cluster

_SHOWN_FAILURES = 10


async def bench_migration(load: Callable[[Places], LoadedConfig], size: migration.Size, *, as_json: bool) -> int:
    """Returns 0 where no answer failed or was wrong."""
    async with own_cluster(load) as cluster:
        baseline = cluster.another_router(router__max_migrations=0)
        report = await migration.measure(cluster.service.address, cluster.router, baseline, size, err.print)
    for sentence in report.sentences[:_SHOWN_FAILURES]:
        err.print(f"  {sentence}")
    print_json(asdict(report)) if as_json else _print(report)
    return 1 if report.failed or report.wrong else 0


def _print(report: migration.MigrationReport) -> None:
    out.print(
        f"without faults, {report.pairs} pairs: TTFT {report.ttft_ratio_without_faults:.3f} and time per token "
        f"{report.tpot_ratio_without_faults:.3f} times what a router takes that lets answers end with their worker"
    )
    out.print(
        f"decode workers killed: {report.migrated} answers went on, pause P50 {report.pause_p50_ms:.0f} ms, "
        f"P99 {report.pause_p99_ms:.0f} ms"
    )
    out.print(
        f"router killed: {report.resumed} answers went on, pause P50 {report.resume_pause_p50_ms:.0f} ms, "
        f"P99 {report.resume_pause_p99_ms:.0f} ms"
    )
    out.print(
        f"a decode worker with {report.drain_answers} answers of {report.drain_tokens} tokens running left in "
        f"{report.drain_s:.1f} s, {report.drain_failed} of them failed"
    )
    out.print(
        f"all workers were started again in {report.rolling_restart_s:.1f} s under {report.rolling_requests} requests, "
        f"{report.rolling_failed} failed"
    )
    out.print(f"{report.failed} of all answers failed, {report.wrong} were wrong")
