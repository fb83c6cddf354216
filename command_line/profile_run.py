"""`rachis profile`: measures recompute and swap on this machine and keeps the figures for `streaming.cost_profile`."""

from pathlib import Path
from typing import Any

from benchmarks.cost_plot import crossover_text, save_plot, table_rows
from benchmarks.measuring_process import measure_in_process
from cluster_configs.loading import LoadedConfig
from cluster_configs.preemption_costs import CostModel, default_model
from cluster_core.clock import monotonic_s
from cluster_core.errors import ConfigError
from command_line.output import out, print_json, print_table
from command_line.output_files import check_writable
from command_line.progress import progress_reports
from prefill_worker.preemption import crossover_tokens


async def profile(loaded: LoadedConfig, output: Path, plot: Path | None, repetitions: int, *, as_json: bool) -> None:
    device = loaded.config.engine.device
    if device == "imitated":
        raise ConfigError(
            "imitated has nothing to be measured: its figures are its cost model's", field="engine.device"
        )
    plot = plot or output.with_suffix(".png")
    check_writable(output, "--output")
    check_writable(plot, "--plot")
    if plot == output:
        raise ConfigError("must be another file than --output", field="--plot")
    began_s = monotonic_s()
    arguments = {
        "config": loaded.config.model_dump(mode="json"),
        "repetitions": repetitions,
        "seed": loaded.config.engine.seed,
        "output": str(output),
    }
    with progress_reports() as reports:
        await measure_in_process("benchmarks.cost_profile", arguments, reports)
    model = CostModel.load(output, default_model(device))
    save_plot(model, plot)
    crossover = crossover_text(model)
    if as_json:
        print_json(_result(model, output, plot, crossover, monotonic_s() - began_s))
        return
    columns = ("tokens", "recompute ms", "swap out ms", "swap in ms", "swap ms", "cheaper", "log scale")
    print_table("", columns, table_rows(model))
    out.print(f"swap is cheaper: {crossover}; took {monotonic_s() - began_s:.0f} s; picture in {plot}", markup=False)
    out.print(f"to use it: --set streaming.cost_profile={output}", markup=False)


def _result(model: CostModel, output: Path, plot: Path, crossover: str, took_s: float) -> dict[str, Any]:
    return {
        "profile": str(output),
        "plot": str(plot),
        "crossover": crossover,
        "crossover_tokens": crossover_tokens(model),
        "recompute_ms": {str(size): round(ms, 4) for size, ms in model.recompute.points.items()},
        "swap_out_ms": {str(size): round(ms, 4) for size, ms in model.swap_out.points.items()},
        "swap_in_ms": {str(size): round(ms, 4) for size, ms in model.swap_in.points.items()},
        "took_s": round(took_s, 1),
        "metadata": dict(model.metadata),
    }
