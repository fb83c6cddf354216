"""`rachis bench prefix-cache`: a trace through the tiers' own classes, policy by policy."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from benchmarks.prefix_cache.comparison import Capacities, Run, compare, facts, figures, number_of_replays, policy_names
from benchmarks.prefix_cache.plot import save_plot
from benchmarks.token_sizes import parse_tokens, short_tokens
from cluster_core.errors import ConfigError
from cluster_sim.workloads.few_shot import SHAPES, generated
from cluster_sim.workloads.traces import Trace, TraceFile, full_blocks_only, open_trace
from command_line.output import out, print_json, print_table, times_text
from command_line.output_files import check_picture
from command_line.progress import quiet_progress

# Of one tier: its tables take about 100 bytes a block.
_MOST_BLOCKS = 1 << 24


@dataclass(frozen=True, slots=True)
class Options:
    """As given, tokens as text."""

    trace: Path | None
    shape: str | None
    noise_share: float
    requests: int | None
    device_tokens: str
    host_tokens: str
    capacities: str | None
    policies: Sequence[str]
    full_blocks_only: bool
    kv_bytes_per_token: int
    plot: Path | None
    seed: int


def bench_prefix_cache(options: Options, *, as_json: bool) -> None:
    names = policy_names(options.policies)
    device_tokens = parse_tokens(options.device_tokens, "--device-tokens")
    host_tokens = parse_tokens(options.host_tokens, "--host-tokens")
    curve_tokens = _curve_tokens(options)
    if options.plot is not None:
        _check_plot(options.plot, curve_tokens)
    trace = full_blocks_only(_trace(options)) if options.full_blocks_only else _trace(options)
    sizes = {
        each: Capacities(_blocks(each, trace, field), _blocks(host_tokens, trace, "--host-tokens", or_none=True))
        for field, each in [("--device-tokens", device_tokens), *(("--capacities", each) for each in curve_tokens)]
    }
    known = facts(trace)
    if not known.requests:
        raise ConfigError("has no requests", field="--trace")
    with _progress(known.requests * number_of_replays(names, sizes.values()), quiet=as_json) as reports:
        runs: dict[int, dict[str, Run]] = {}
        for each, capacities in sizes.items():
            reports.at(f"{short_tokens(each)} + {short_tokens(host_tokens)}")
            runs[each] = compare(trace, names, capacities, known.requests, reports)
    title = f"{trace.name}, {known.requests} requests, {short_tokens(host_tokens)} host tokens"
    if options.plot is not None:
        ratios = {name: [runs[each][name].ratios.hit_ratio for each in curve_tokens] for name in names}
        save_plot(curve_tokens, ratios, title, options.plot)
    by_size = {each: figures(run, trace.block_tokens * options.kv_bytes_per_token) for each, run in runs.items()}
    if as_json:
        print_json(
            {
                "policies": by_size[device_tokens],
                "trace": asdict(known),
                "device_tokens": device_tokens,
                "host_tokens": host_tokens,
                "device_blocks": sizes[device_tokens].device_blocks,
                "host_blocks": sizes[device_tokens].host_blocks,
                "kv_bytes_per_token": options.kv_bytes_per_token,
                "seed": options.seed,
                "noise_share": options.noise_share,
                "full_blocks_only": options.full_blocks_only,
                "curve": [{"device_tokens": each, "policies": by_size[each]} for each in curve_tokens],
                "plot": str(options.plot) if options.plot is not None else None,
            }
        )
        return
    out.print(f"{title}\n{known.input_tokens} prompt tokens in blocks of {known.block_tokens}")
    out.print(f"with a cache without end {known.ideal_hit_ratio:.1%} of them hit\n")
    _print_policies(f"{short_tokens(device_tokens)} device tokens", by_size[device_tokens])
    if curve_tokens:
        rows = [(name, *(f"{by_size[each][name]['hit_ratio']:.1%}" for each in curve_tokens)) for name in names]
        print_table("\nhit ratio by device tokens", ("policy", *map(short_tokens, curve_tokens)), rows)
    if options.plot is not None:
        out.print(f"picture in {options.plot}")


def _curve_tokens(options: Options) -> list[int]:
    """Each once, ascending."""
    parts = [part for part in (options.capacities or "").split(",") if part.strip()]
    if options.capacities is not None and not parts:
        raise ConfigError("must be numbers of tokens with commas, such as 1M,2M,4M", field="--capacities")
    return sorted({parse_tokens(part, "--capacities") for part in parts})


def _check_plot(plot: Path, curve_tokens: list[int]) -> None:
    if len(curve_tokens) < 2:
        raise ConfigError("needs at least two --capacities, such as 1M,2M,4M", field="--plot")
    check_picture(plot, "--plot")


def _trace(options: Options) -> Trace | TraceFile:
    """Raises ConfigError, or TraceError for a file that cannot be read."""
    if (options.trace is None) == (options.shape is None):
        raise ConfigError("give either --trace or --generated", field="--trace")
    if options.trace is None:
        shape = SHAPES.get(options.shape or "")
        if shape is None:
            raise ConfigError(f"must be of {', '.join(SHAPES)}, got {options.shape}", field="--generated")
        most = sum(shape.queries)
        if (options.requests or 0) > most:
            raise ConfigError(f"{shape.name} has {most} queries, got {options.requests}", field="--requests")
        return generated(shape, requests=options.requests, noise_share=options.noise_share, seed=options.seed)
    if options.noise_share:
        raise ConfigError("is for --generated only", field="--noise-share")
    file = open_trace(options.trace, seed=options.seed)
    return replace(file, reader=lambda: islice(file, options.requests))


def _blocks(size_tokens: int, trace: Trace | TraceFile, option: str, *, or_none: bool = False) -> int:
    """What fits into so many tokens. or_none: there may be no such tier."""
    least, most = trace.block_tokens, trace.block_tokens * _MOST_BLOCKS
    if not (least <= size_tokens <= most or (or_none and not size_tokens)):
        limits = f"{'0, or ' if or_none else ''}from {least} (one block of this trace) to {most}"
        raise ConfigError(f"must be {limits}, got {size_tokens}", field=option)
    return size_tokens // trace.block_tokens


class _Reports:
    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task
        self._place = ""

    def at(self, place: str) -> None:
        self._place = place

    def phase(self, text: str) -> None:
        self._progress.update(self._task, description=f"{text} at {self._place}")

    def done(self, steps: int = 1) -> None:
        self._progress.advance(self._task, steps)


@contextmanager
def _progress(steps: int, *, quiet: bool) -> Iterator[_Reports]:
    columns = TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with quiet_progress(*columns, hidden=quiet) as progress:
        yield _Reports(progress, progress.add_task("requests", total=steps))


def _print_policies(title: str, by_policy: dict[str, dict[str, Any]]) -> None:
    rows = [
        (
            name,
            *(f"{each[key]:.1%}" for key in ("hit_ratio", "device_hit_ratio", "host_hit_ratio")),
            times_text(each["hit_ratio_vs_lru"]),
            each["blocks_copied"],
            f"{each['bytes_copied'] / 2**30:.1f}",
            times_text(each["bytes_vs_copy_everything"]),
        )
        for name, each in by_policy.items()
    ]
    columns = ("policy", "hit ratio", "device", "host", "x lru", "blocks copied", "GiB copied", "x copy everything")
    print_table(title, columns, rows)
