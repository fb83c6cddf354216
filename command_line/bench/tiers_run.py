"""`rachis bench tiers`: cached prefixes over two tiers on a real engine, against plain vLLM and against copying all."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.measuring_process import measure_in_process
from benchmarks.tiers_workload import TiersWorkload, fewest_device_blocks, require_model_length
from benchmarks.ttft_plot import save_plot
from cluster_configs.loading import LoadedConfig
from cluster_core.errors import ConfigError
from cluster_sim.workloads.few_shot import SHAPES
from command_line.bench.foreign_cores import warn_of_foreign_cores
from command_line.output import out, print_json, print_table, times_text
from command_line.output_files import check_picture
from command_line.progress import progress_reports


@dataclass(frozen=True, slots=True)
class Options:
    """As given."""

    shape: str
    requests: int
    noise_share: float
    concurrency: int
    rounds: int
    # None takes what the workload asks for.
    device_blocks: int | None
    plot: Path | None
    seed: int


async def bench_tiers(loaded: LoadedConfig, options: Options, *, as_json: bool) -> None:
    workload = checked(options, loaded)
    if options.plot is not None:
        check_picture(options.plot, "--plot")
    arguments = {
        "config": loaded.config.model_dump(mode="json"),
        "workload": asdict(workload),
        "device_blocks": options.device_blocks,
    }
    with progress_reports() as reports:
        result = await measure_in_process("benchmarks.tiers", arguments, reports)
    samples_ms = result.pop("samples_ms")
    drawn = result["workload"]
    title = f"{drawn['shape']}, {drawn['requests']} requests, {drawn['device_blocks']} + {drawn['host_blocks']} blocks"
    if options.plot is not None:
        save_plot(samples_ms, title, options.plot)
    if as_json:
        print_json({**result, "plot": str(options.plot) if options.plot is not None else None})
        return
    _print(result["variants"])
    out.print(
        f"{title} of {drawn['block_size_tokens']} tokens, of device and host memory; prompts of "
        f"{drawn['prompt_tokens']} tokens share {drawn['shared_blocks']} blocks; all answers are the same"
    )
    warn_of_foreign_cores(each["foreign_cores"] for each in result["variants"].values())
    if options.plot is not None:
        out.print(f"picture in {options.plot}")


def checked(options: Options, loaded: LoadedConfig) -> TiersWorkload:
    """Before an engine starts. Raises ConfigError, or InvalidInputError for a model too short."""
    shape = SHAPES.get(options.shape)
    if shape is None:
        raise ConfigError(f"must be of {', '.join(SHAPES)}, got {options.shape}", field="--shape")
    most = sum(shape.queries)
    if options.requests > most:
        raise ConfigError(f"{shape.name} has {most} queries, got {options.requests}", field="--requests")
    workload = TiersWorkload(
        shape.name, options.requests, options.noise_share, options.concurrency, options.rounds, options.seed
    )
    engine = loaded.config.engine
    trace = workload.trace(engine.block_size_tokens)
    require_model_length(trace, engine.max_model_len)
    fewest = fewest_device_blocks(trace, options.concurrency)
    if options.device_blocks is not None and options.device_blocks < fewest:
        raise ConfigError(
            f"must be at least {fewest}, for {options.concurrency} of the longest prompts at once, "
            f"got {options.device_blocks}",
            field="--device-blocks",
        )
    return workload


def _print(variants: Mapping[str, Mapping[str, Any]]) -> None:
    print_table(
        "TTFT (ms), its mean over those of stock and of copy_everything, and time in all",
        ("", "mean", "p50", "p90", "p99", "x stock", "x copy", "total s"),
        [
            (
                name,
                *(f"{ms:.1f}" for ms in each["ttft_ms"].values()),
                *_against(each, "ttft_mean"),
                f"{each['total_s']:.1f}",
            )
            for name, each in variants.items()
        ],
    )
    print_table(
        "\nprompt tokens",
        ("", "computed", "x stock", "x copy", "hit ratio", "device", "host"),
        [
            (
                name, each["tokens_computed"], *_against(each, "tokens_computed"),
                f"{each['hit_ratio']:.1%}", each["device_hit_tokens"], each["host_hit_tokens"],
            )
            for name, each in variants.items()
        ],
    )  # fmt: skip
    print_table(
        "\nblocks copied to host memory and back, and promoted among those",
        ("", "out", "back", "MiB", "x copy", "promoted", "used", "wasted", "refused"),
        [
            (
                name, each["copied_out_blocks"], each["copied_back_blocks"], each["copied_bytes"] >> 20,
                times_text(each["vs_copy_everything"]["copied_bytes"]), each["promoted_blocks"],
                each["promoted_used_blocks"], each["promoted_wasted_blocks"], sum(each["refused_offers"].values()),
            )
            for name, each in variants.items()
        ],
    )  # fmt: skip
    for name, each in variants.items():
        reasons = [f"{number} {why.replace('_', ' ')}" for why, number in each["refused_offers"].items() if number]
        if reasons:
            out.print(f"{name} refused copies: {', '.join(reasons)}")


def _against(figures: Mapping[str, Any], name: str) -> tuple[str, str]:
    return times_text(figures["vs_stock"][name]), times_text(figures["vs_copy_everything"][name])
