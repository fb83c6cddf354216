"""`rachis bench streaming`: TTFT of streamed prompts by policy, against waiting for the whole context."""

import asyncio
from typing import Annotated, Any

import typer

from benchmarks.measuring_process import measure_in_process
from cluster_configs.loading import LoadedConfig
from cluster_core.engine import SessionMode
from cluster_core.errors import ConfigError
from command_line import options
from command_line.bench.foreign_cores import warn_of_foreign_cores
from command_line.output import out, print_json, print_table
from command_line.progress import progress_reports
from prefill_worker.policies import POLICIES

_SHARES = ("p50", "p95", "p99")


def register(bench: typer.Typer) -> None:
    bench.command("streaming")(streaming_command)


def streaming_command(
    mode: Annotated[SessionMode, typer.Option(help="Context that grows, or is replaced as well.")] = SessionMode.APPEND,
    policy: Annotated[
        list[str] | None, typer.Option(help="Policies beside the baselines, with commas or several times; default all.")
    ] = None,
    preemption: Annotated[str | None, typer.Option(help="recompute, swap or cost.")] = None,
    sessions: Annotated[int, typer.Option(min=1, max=100_000)] = 60,
    rate: Annotated[float, typer.Option(min=0.001, max=10_000, help="Sessions that arrive in a second.")] = 2.0,
    token_scale: Annotated[float, typer.Option(min=0.0001, max=100, help="On the published context lengths.")] = 0.25,
    time_scale: Annotated[float, typer.Option(min=0.0, max=100, help="On the published delays of retrieval.")] = 0.25,
    kv_blocks: Annotated[int | None, typer.Option(min=8, help="Blocks of the engine; few make memory scarce.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Another seed gives another trace.")] = 0,
    profile: options.Profile = None,
    config: options.ConfigFile = None,
    assignments: options.Assignments = None,
    model: options.Model = None,
    as_json: options.AsJson = False,
) -> None:
    """TTFT of streamed prompts by policy, against waiting for the whole context."""
    flags = {"streaming.preemption": preemption, "engine.kv_blocks": kv_blocks}
    given = {key: value for key, value in flags.items() if value is not None}
    loaded = options.load_config(profile, config, assignments, model, given)
    workload = {
        "mode": mode.value,
        "sessions": sessions,
        "rate_per_s": rate,
        "token_scale": token_scale,
        "time_scale": time_scale,
        "seed": seed,
    }
    asyncio.run(bench_streaming(loaded, workload, _policies(policy), as_json=as_json))


async def bench_streaming(
    loaded: LoadedConfig, workload: dict[str, Any], policies: list[str], *, as_json: bool
) -> None:
    arguments = {"config": loaded.config.model_dump(mode="json"), "workload": workload, "policies": policies}
    with progress_reports() as reports:
        result = await measure_in_process("benchmarks.streaming", arguments, reports)
    if as_json:
        print_json(result)
        return
    runs = result["policies"]
    print_table(
        "TTFT after finish (ms), and how many times faster than ns", ("", *_SHARES, *(f"x {each}" for each in _SHARES)),
        [(name, *_shares(figures["ttft_after_finish_ms"], 1), *_shares(figures["speedup_vs_ns"], 2))
         for name, figures in runs.items()],
    )  # fmt: skip
    print_table(
        "TTFT from open (ms), completion against ns, sessions preempted, tokens invalidated",
        ("", *_SHARES, "completion", "swapped", "recomputed", "invalidated"),
        [(name, *_shares(figures["ttft_from_open_ms"], 0), *_rest(figures)) for name, figures in runs.items()],
    )
    warn_of_foreign_cores(figures["foreign_cores"] for figures in runs.values())
    drawn = result["workload"]
    out.print(
        f"{drawn['sessions']} sessions, {drawn['inputs']} inputs, {drawn['all_prompt_tokens']} prompt tokens; "
        f"the last input after {drawn['last_input_s']} s"
    )


def _policies(given: list[str] | None) -> list[str]:
    names = [name.strip() for each in given or POLICIES for name in each.split(",") if name.strip()]
    unknown = next((name for name in names if name not in POLICIES), None)
    if unknown is not None:
        raise ConfigError(f"must be of {', '.join(POLICIES)}, got {unknown}", field="--policy")
    return names


def _shares(values: dict[str, float], digits: int) -> list[str]:
    return [f"{values[share]:.{digits}f}" for share in _SHARES]


def _rest(figures: dict[str, Any]) -> tuple[str, ...]:
    preemptions = figures["preemptions"]
    return (
        f"{figures['completion_ratio_vs_ns']:.3f}",
        str(preemptions["swap"]),
        str(preemptions["recompute"]),
        str(figures["tokens_invalidated"]),
    )
