"""`rachis bench feather`: stop policies of the decode scheduler on a real engine, against order of arrival."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.feather.plot import save_plot
from benchmarks.feather.workload import MOST_LEVELS, FeatherWorkload, require_model_length
from benchmarks.measuring_process import measure_in_process
from cluster_configs.loading import LoadedConfig
from cluster_core.errors import ConfigError
from command_line.bench.foreign_cores import warn_of_foreign_cores
from command_line.output import out, print_json, print_table
from command_line.output_files import check_picture
from command_line.progress import progress_reports

POLICIES = ("greedy", "heuristic", "bandit", "q_learning")
_ALWAYS = ("fcfs", "fcfs_ordered")
# What each sweep changes of the workload, by point.
SWEEPS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "groups": {f"{each} groups": {"groups": each} for each in (2, 20, 100)},
    "shared": {f"{each} shared tokens": {"shared_tokens": each} for each in (500, 1000, 2000)},
    "decode": {f"{each} decode tokens": {"decode_tokens": each} for each in (8, 32, 200)},
    "rate": {f"{each} a second": {"rate": float(each)} for each in (5, 10, 20, 80)},
    "levels": {f"{each} levels": {"levels": each, "groups": 6} for each in (2, 3)},
}


@dataclass(frozen=True, slots=True)
class Options:
    """As given."""

    workload: FeatherWorkload
    places: int
    rounds: int
    policies: Sequence[str]
    # Names of `SWEEPS`.
    sweep: Sequence[str]
    plot: Path | None


async def bench_feather(loaded: LoadedConfig, options: Options, *, as_json: bool) -> None:
    sweep = checked(options, loaded)
    arguments = {
        "config": loaded.config.model_dump(mode="json"),
        "places": options.places,
        "rounds": options.rounds,
        "variants": [*_ALWAYS, *options.policies],
        "workload": asdict(options.workload),
        "sweep": {name: asdict(each) for name, each in sweep.items()},
    }
    with progress_reports() as reports:
        result = await measure_in_process("benchmarks.feather.measure", arguments, reports)
    series = result.pop("series")
    if options.plot is not None:
        save_plot(series, result["ceiling_tok_s"], _title(result["workload"]), options.plot)
    if as_json:
        print_json({**result, "plot": str(options.plot) if options.plot is not None else None})
        return
    _print(_title(result["workload"]), result["policies"])
    drawn, plain = result["workload"], result["vllm"]
    out.print(
        f"{drawn['places']} at once, {drawn['rate']:g} arrivals/s, {drawn['decode_tokens']} tokens each; one group "
        f"{result['ceiling_tok_s']:.0f} tokens/s, plain vLLM {plain['throughput_tok_s']:.0f}; all answers are the same"
    )
    _print("\none group", result["one_group"])
    _print("\nnobody shares anything", result["no_sharing"])
    for name, each in result["sweep"].items():
        _print(f"\n{name}", each["policies"])
    warn_of_foreign_cores(each["foreign_cores"] for each in result["policies"].values())
    if options.plot is not None:
        out.print(f"picture in {options.plot}")


def checked(options: Options, loaded: LoadedConfig) -> dict[str, FeatherWorkload]:
    """The workloads of the sweeps, before an engine starts. Raises ConfigError or InvalidInputError."""
    for name in options.policies:
        if name not in POLICIES:
            raise ConfigError(f"must be of {', '.join(POLICIES)}, got {name}", field="--policy")
    for name in options.sweep:
        if name not in SWEEPS:
            raise ConfigError(f"must be of {', '.join(SWEEPS)}, got {name}", field="--sweep")
    if not 1 <= options.workload.levels <= MOST_LEVELS:
        raise ConfigError(f"must be 1 to {MOST_LEVELS}, got {options.workload.levels}", field="--levels")
    if options.plot is not None:
        check_picture(options.plot, "--plot")
    points = {
        name: replace(options.workload, **changed) for sweep in options.sweep for name, changed in SWEEPS[sweep].items()
    }
    for each in (options.workload, *points.values()):
        require_model_length(each, loaded.config.engine.max_model_len)
    return points


def _title(drawn: Mapping[str, Any]) -> str:
    if not drawn["groups"]:
        return "nobody shares anything"
    levels = f" in {drawn['levels']} levels" if drawn["levels"] > 1 else ""
    return f"{drawn['groups']} groups of {drawn['shared_tokens']} shared tokens{levels}"


def _print(title: str, policies: Mapping[str, Mapping[str, Any]]) -> None:
    ceiling = any("share_of_ceiling" in each for each in policies.values())
    print_table(
        f"{title}; times in ms",
        ("", "tok/s", "x fcfs", *(("ceiling",) if ceiling else ()), "TBT p50", "wait p99", "held p99", "batch", "CPU"),
        [
            (
                name, f"{each['throughput_tok_s']:.0f}", f"{each['speedup_vs_fcfs']:.2f}",
                *((f"{each['share_of_ceiling']:.0%}",) if ceiling else ()),
                f"{each['tbt_p50_ms']:.1f}", f"{each['wait_p99_ms']:.0f}", f"{each['held_p99_ms']:.0f}",
                f"{each['mean_batch']:.1f}", f"{each['scheduler_cpu_share']:.1%}",
            )
            for name, each in policies.items()
        ],
    )  # fmt: skip
