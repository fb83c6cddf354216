"""`rachis bench pace`: times between tokens of many answers out of imitated GPUs, beside the cost model's."""

from dataclasses import asdict, replace

from benchmarks.measuring_process import measure_in_process
from benchmarks.pace import PaceReport, Streams, report_of
from cluster_configs.loading import LoadedConfig
from cluster_core.errors import ConfigError
from cluster_sim.costs import catalog
from command_line.output import computes_nothing, out, print_json, print_table
from command_line.own_service import target_service
from command_line.progress import progress_reports
from control_plane.service.state import StateFile


async def bench_pace(loaded: LoadedConfig, state_file: StateFile, asked: Streams, *, as_json: bool) -> None:
    """Raises ConfigError where the engines are not imitated."""
    name = loaded.config.engine.cost_model
    if name is None:
        raise ConfigError("must be imitated: a real engine has no time to keep", field="engine.device")
    costs = catalog.load(name)
    async with target_service(None, state_file, loaded, always_own=True) as target:
        with progress_reports() as reports:
            arguments = asdict(replace(asked, address=target.address))
            measured = await measure_in_process("benchmarks.pace", arguments, reports)
    report = report_of(measured, costs, asked.streams, target.start_s)
    print_json({**asdict(report), "p99_of_model": round(report.p99_of_model, 3)}) if as_json else _print(report)


def _print(report: PaceReport) -> None:
    print_table(
        f"{report.streams} answers on {len(report.by_worker)} decode workers", ("time between tokens", "P50", "P99"),
        [
            ("came", f"{report.p50_ms:.2f} ms", f"{report.p99_ms:.2f} ms"),
            ("the cost model's", f"{report.modelled_p50_ms:.2f} ms", f"{report.modelled_p99_ms:.2f} ms"),
        ],
    )  # fmt: skip
    out.print(
        f"{report.tokens_per_s:.0f} tokens/s, {report.tokens_per_message:.2f} in a message; the service was up in "
        f"{report.start_s or 0:.1f} s; reading took {report.client_cores:.2f} cores"
    )
    out.print(computes_nothing(report.cost_model))
