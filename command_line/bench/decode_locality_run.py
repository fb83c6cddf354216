"""`rachis bench decode-locality`: decode step time by what a batch shares, kept for the simulator's cost model."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.decode_locality.batches import QUICK, Grid
from benchmarks.decode_locality.plot import plain_points, save_plot, table_of
from benchmarks.measuring_process import measure_in_process
from cluster_configs.loading import LoadedConfig
from cluster_core.errors import ConfigError
from command_line.bench.foreign_cores import warn_of_foreign_cores
from command_line.output import out, print_json, print_table
from command_line.output_files import check_picture, check_writable
from command_line.progress import progress_reports

# A request decodes meanwhile, and its suffix has to be longer than that.
_SHORTEST_SUFFIX_TOKENS = 16
_MOST_REQUESTS = 1024
_MOST_TOKENS = 1_000_000
# Of one option: the first round visits every combination, whatever the limit.
_MOST_NUMBERS = 16


@dataclass(frozen=True, slots=True)
class Options:
    """As given; lists are whole numbers with commas, None takes the grid's own."""

    output: Path
    # None is beside the output.
    plot: Path | None
    quick: bool
    batches: str | None
    groups: str | None
    shared_tokens: str | None
    suffix_tokens: str | None
    rounds: int
    limit_s: float
    seed: int


async def bench_decode_locality(loaded: LoadedConfig, options: Options, *, as_json: bool) -> None:
    grid = checked(options, loaded)
    plot = options.plot or options.output.with_suffix(".png")
    check_writable(options.output, "--output")
    check_picture(plot, "--plot")
    if plot == options.output:
        raise ConfigError("must be another file than --output", field="--plot")
    arguments = {
        "config": loaded.config.model_dump(mode="json"),
        "grid": asdict(grid),
        "rounds": options.rounds,
        "limit_s": options.limit_s,
        "seed": options.seed,
    }
    with progress_reports() as reports:
        result = await measure_in_process("benchmarks.decode_locality.measure", arguments, reports)
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    save_plot(result, plot)
    if as_json:
        print_json({**result, "output": str(options.output), "plot": str(plot)})
        return
    _print(result)
    warn_of_foreign_cores([result["foreign_cores"]])
    out.print(f"figures in {options.output}, picture in {plot}; took {result['took_s']:.0f} s")


def checked(options: Options, loaded: LoadedConfig) -> Grid:
    """Before an engine starts. Raises ConfigError."""
    default = QUICK if options.quick else Grid()
    given = {
        "batches": _numbers(options.batches, "--batches", 1, _MOST_REQUESTS),
        "groups": _numbers(options.groups, "--groups", 1, _MOST_REQUESTS),
        "shared_tokens": _numbers(options.shared_tokens, "--shared", 1, _MOST_TOKENS),
        "suffix_tokens": _numbers(options.suffix_tokens, "--suffix", _SHORTEST_SUFFIX_TOKENS, _MOST_TOKENS),
    }
    grid = Grid(**{**asdict(default), **{name: numbers for name, numbers in given.items() if numbers}})
    # The longest is measured in any case, or the figures would tell of another grid than was asked for.
    longest = max(grid.shared_tokens) + max(grid.suffix_tokens)
    most = loaded.config.engine.max_model_len
    if any(given.values()) and longest >= most:
        raise ConfigError(f"{longest} tokens with the suffix, engine.max_model_len is {most}", field="--shared")
    return grid


def _numbers(text: str | None, option: str, lowest: int, highest: int) -> tuple[int, ...]:
    """Ascending, each once; empty when not given."""
    if text is None:
        return ()
    try:
        numbers = {int(part) for part in text.split(",")}
    except ValueError:
        raise ConfigError(f"must be whole numbers with commas, got {text!r}", field=option) from None
    if len(numbers) > _MOST_NUMBERS:
        raise ConfigError(f"must be at most {_MOST_NUMBERS} numbers, got {len(numbers)}", field=option)
    if not all(lowest <= number <= highest for number in numbers):
        raise ConfigError(f"must be from {lowest} to {highest}, got {text}", field=option)
    return tuple(sorted(numbers))


def _print(result: dict[str, Any]) -> None:
    shown = plain_points(result)[0]
    print_table(
        f"decode step (ms), prefixes of {shown['shared_tokens']} tokens + {shown['suffix_tokens']}; "
        "requests interleaved / grouped by prefix",
        *table_of(result),
    )
    fit, cache = result["fit"], result["cache_fit"]
    out.print(
        f"\nstep = {fit['base_ms']:.2f} ms + {fit['per_request_ms'] * 1e3:.0f} us a request + "
        f"{fit['per_total_token_ms'] * 1e6:.0f} ns a KV token + {fit['per_distinct_token_ms'] * 1e6:.0f} ns a distinct "
        f"one; off by {fit['median_error_pct']:.0f}% (median), {fit['p90_error_pct']:.0f}% (p90)"
    )
    if "capacity_tokens" in cache:
        out.print(
            f"with a cache of {cache['capacity_tokens']} tokens, which sees the order of the batch: off by "
            f"{cache['median_error_pct']:.0f}% and {cache['p90_error_pct']:.0f}%"
        )
    _print_verdict(result["verdict"])
    if result["left_out"]:
        out.print(f"{result['left_out']} batches do not fit the model's length or the KV pool: left out")


def _print_verdict(verdict: dict[str, Any]) -> None:
    if verdict["all_or_nothing"] is None:
        out.print("whether attention is all or nothing was not measured: no batch of three or more")
        return
    by_model = ", ".join(f"{name.replace('_', ' ')} {ms:.2f}" for name, ms in verdict["predicted_ms"].items())
    found = (
        "an all-or-nothing attention path"
        if verdict["all_or_nothing"]
        else "no sign of an all-or-nothing attention path"
    )
    out.print(
        f"first divergent request: {verdict['jump_ms']:+.2f} ms (predicted: {by_model}); a short stranger: "
        f"{verdict['stranger_ms']:+.2f} ms, noise {verdict['noise_ms']:.2f}: {found}"
    )
