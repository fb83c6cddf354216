"""`rachis bench placement`: policies of placement on a trace, over simulated prefill workers."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.placement import BASELINE, Run, at_speed, prompts_of, simulate, speed_for, speedups
from benchmarks.placement_costs import PrefillCosts, default_costs, read_costs
from benchmarks.placement_plot import save_plot
from benchmarks.placement_world import Caches, Cluster, Prompt
from benchmarks.token_sizes import parse_tokens, short_tokens
from cluster_core.errors import ConfigError
from cluster_sim.workloads.traces import Trace, open_trace
from command_line.output import err, out, print_json, print_table
from command_line.output_files import check_picture
from control_plane.placement.terms import POLICIES
from kv_transfer.tiers.settings import TierSettings

OURS = "hotness"
_MOST_BLOCKS = 1 << 22


@dataclass(frozen=True, slots=True)
class Options:
    """As given, tokens as text. speed: instead of a load. costs: None for the rough ones. requests: the first."""

    trace: Path
    workers: int
    load: float
    speed: float | None
    policies: Sequence[str]
    device_tokens: str
    host_tokens: str
    costs: Path | None
    event_delay_ms: float
    prediction_s: float
    requests: int | None
    plot: Path | None
    seed: int


def bench_placement(options: Options, *, as_json: bool) -> None:
    names = policy_names(options.policies)
    if options.plot is not None:
        check_picture(options.plot, "--plot")
    costs = read_costs(options.costs) if options.costs is not None else default_costs()
    file = open_trace(options.trace, seed=options.seed)
    cluster = Cluster(
        options.workers, _caches(options, file.block_tokens), costs,
        options.event_delay_ms / 1000, options.prediction_s, options.seed,
    )  # fmt: skip
    trace = Trace(file.name, file.block_tokens, tuple(islice(file, options.requests)))
    if not trace.requests:
        raise ConfigError("has no requests", field="--trace")
    prompts = prompts_of(trace, options.seed)
    _check(prompts, cluster)
    with _progress(len(prompts), quiet=as_json) as reports:
        speed, runs = _compared(names, prompts, cluster, options, reports)
    figures = {name: run.figures() for name, run in runs.items()}
    title = f"{trace.name}, {len(prompts)} requests, {options.workers} workers, speed {speed:.2f}"
    if options.plot is not None:
        save_plot({name: run.ttft_s * 1000 for name, run in runs.items()}, title, options.plot)
    if as_json:
        print_json(_result(options, trace, cluster, speed, prompts, figures))
        return
    _print(title, trace, costs, figures)
    if options.plot is not None:
        out.print(f"picture in {options.plot}")


def policy_names(given: Sequence[str]) -> list[str]:
    """With commas or one by one, each once; none given: all. Raises ConfigError."""
    names = [name.strip() for each in given for name in each.split(",") if name.strip()]
    for name in names:
        if name not in POLICIES:
            raise ConfigError(f"must be of {', '.join(POLICIES)}, got {name}", field="--policy")
    return list(dict.fromkeys(names or POLICIES))


def _compared(
    names: Sequence[str], prompts: Sequence[Prompt], cluster: Cluster, options: Options, reports: "_Reports"
) -> tuple[float, dict[str, Run]]:
    """The speed, and a run of each policy at it."""
    known: dict[str, Run] = {}
    speed = options.speed
    if speed is None:
        reports.at("speed")
        speed, known[BASELINE] = speed_for(options.load, prompts, cluster, reports.done)
    faster = at_speed(prompts, speed)
    runs: dict[str, Run] = {}
    for name in names:
        if name not in known:
            reports.at(name)
            known[name] = simulate(faster, name, cluster, reports.done)
        runs[name] = known[name]
    return speed, runs


def _caches(options: Options, block_tokens: int) -> Caches:
    device_blocks = _blocks(options.device_tokens, "--device-tokens", block_tokens, least=block_tokens)
    host_blocks = _blocks(options.host_tokens, "--host-tokens", block_tokens, least=0)
    return Caches(block_tokens, device_blocks, host_blocks, TierSettings())


def _blocks(text: str, field: str, block_tokens: int, *, least: int) -> int:
    size, most = parse_tokens(text, field), block_tokens * _MOST_BLOCKS
    if not least <= size <= most:
        raise ConfigError(f"must be from {least} to {most} for blocks of {block_tokens}, got {size}", field=field)
    return size // block_tokens


def _check(prompts: Sequence[Prompt], cluster: Cluster) -> None:
    """Raises ConfigError for a prompt that no worker can hold, and where nothing takes any time."""
    room, longest = cluster.caches.device_blocks * cluster.caches.block_tokens, max(each.tokens for each in prompts)
    if not cluster.caches.holds(longest):
        raise ConfigError(
            f"must hold the longest prompt, {longest} tokens, and one token more, got {room}",
            field="--device-tokens",
        )
    if not any(cluster.costs.prefill_s(each.tokens, 0, 0) for each in prompts):
        raise ConfigError("must not be zero for every prompt", field="--costs")


def _result(
    options: Options, trace: Trace, cluster: Cluster, speed: float, prompts: Sequence[Prompt],
    figures: Mapping[str, dict[str, Any]],
) -> dict[str, Any]:  # fmt: skip
    return {
        "policies": figures,
        "ttft_p90_speedup": speedups(figures, OURS, "ttft_p90_ms"),
        "trace": {
            "name": trace.name,
            "requests": len(prompts),
            "prompt_tokens": sum(each.tokens for each in prompts),
            "block_tokens": trace.block_tokens,
        },
        "workers": cluster.workers,
        "load": options.load if options.speed is None else None,
        "speed": round(speed, 4),
        "requests_per_s": round(len(prompts) * speed / prompts[-1].arrival_s, 3) if prompts[-1].arrival_s else None,
        "device_tokens": parse_tokens(options.device_tokens, "--device-tokens"),
        "host_tokens": parse_tokens(options.host_tokens, "--host-tokens"),
        "costs": cluster.costs.table(),
        "event_delay_ms": options.event_delay_ms,
        "prediction_s": options.prediction_s,
        "seed": options.seed,
        "plot": str(options.plot) if options.plot is not None else None,
    }


def _print(title: str, trace: Trace, costs: PrefillCosts, figures: Mapping[str, Mapping[str, Any]]) -> None:
    out.print(title)
    shares = ("50", "90", "99")
    times = speedups({name: dict(each) for name, each in figures.items()}, OURS, "ttft_p90_ms")
    rows = [
        (
            name, *(f"{each[f'ttft_p{share}_ms']:.0f}" for share in shares), f"{each['queue_p90_ms']:.0f}",
            f"{each['hit_ratio']:.1%}", f"{each['imbalance']:.2f}", f"{each['load']:.2f}",
            f"{times[name]:.2f}" if name in times else "-",
        )
        for name, each in figures.items()
    ]  # fmt: skip
    columns = (
        "policy",
        *(f"P{share}" for share in shares),
        "queued P90",
        "hits",
        "imbalance",
        "load",
        "P90 x",
    )
    print_table(f"TTFT in ms; P90 x: of {OURS}", columns, rows)
    longest = max(each.input_tokens for each in trace)
    out.print(f"simulated; a prompt of {short_tokens(longest)} tokens takes {costs.prefill_s(longest, 0, 0):.2f} s")


class _Reports:
    def __init__(self, progress: Progress, requests: int) -> None:
        self._progress = progress
        self._requests = requests
        self._task = progress.add_task("", total=requests)

    def at(self, place: str) -> None:
        self._progress.reset(self._task, description=place, total=self._requests)

    def done(self, steps: int) -> None:
        task = self._progress.tasks[0]
        if task.completed >= self._requests:
            # Another trial of the same policy.
            self._progress.reset(self._task, description=task.description, total=self._requests)
        self._progress.advance(self._task, steps)


@contextmanager
def _progress(requests: int, *, quiet: bool) -> Iterator[_Reports]:
    with Progress(
        TextColumn("{task.description:<16}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=err,
        # Drawing takes the processor from the simulation.
        refresh_per_second=1, disable=quiet or not err.is_terminal, transient=True,
    ) as progress:  # fmt: skip
        yield _Reports(progress, requests)
