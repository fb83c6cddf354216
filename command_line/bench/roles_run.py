"""`rachis bench roles`: how many workers are prefill-heavy while the load shifts, on an own service."""

from benchmarks import roles
from benchmarks.roles import Shift
from cluster_configs.loading import LoadedConfig
from cluster_core.errors import ConfigError
from command_line.output import out, print_json, print_table
from command_line.own_service import target_service
from command_line.progress import progress_reports
from control_plane.placement.roles import most_heavy
from control_plane.service.state import StateFile


async def bench_roles(loaded: LoadedConfig, state_file: StateFile, shift: Shift, *, as_json: bool) -> None:
    """Raises ConfigError where nothing would follow, or the engines are imitated."""
    config = loaded.config
    if config.engine.device == "imitated":
        raise ConfigError("must compute: answers are compared with plain vLLM", field="engine.device")
    if config.placement_policy != "objectives":
        raise ConfigError("must be objectives: other policies have no roles", field="placement.policy")
    if config.placement.by_objectives.prefill_heavy is not None:
        raise ConfigError("must not be set: roles would not follow", field="placement.by_objectives.prefill_heavy")
    workers = config.pools.shared.workers
    if not most_heavy(workers):
        raise ConfigError(
            f"is {workers}: of so few none is prefill-heavy, take 4 or more", field="pools.shared.workers"
        )
    with progress_reports() as progress:
        progress.phase("answers of one plain vLLM")
        wanted, right = await roles.expected(config, shift, progress)
    async with target_service(None, state_file, loaded, always_own=True) as target:
        before = await roles.starts(target.address)
        with progress_reports() as progress:
            progress.phase("requests of three phases")
            tallies = await roles.play(target.address, shift, wanted, right, progress)
        found = roles.report(tallies, before, await roles.starts(target.address))
    if as_json:
        print_json(found)
        return
    print_table(
        f"a load that shifts on {found['workers']} workers",
        ("phase", "requests", "TTFT P50", "P90", "prefill-heavy at end", "since"),
        [
            (
                phase["load"], phase["requests"], _seconds(phase["ttft_p50_s"]), _seconds(phase["ttft_p90_s"]),
                phase["heavy_at_end"], f"{phase['settled_s']} s",
            )
            for phase in found["phases"]
        ],
    )  # fmt: skip
    out.print(f"{found['failed']} failed, {found['wrong']} wrong, {found['restarts']} workers were started again")


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value} s"
