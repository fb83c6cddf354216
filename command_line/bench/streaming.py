"""The options of `rachis bench streaming`; streaming_run.py does the work."""

import asyncio
from typing import Annotated

import typer

from cluster_core.engine_jobs import SessionMode
from command_line import options


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
    load: Annotated[
        str | None,
        typer.Option(help="Instead of --rate: shares of what the engine computes, measured first, such as 0.5,0.9."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="How often each policy runs, in turn.")] = 1,
    simulated: Annotated[
        bool,
        typer.Option(
            "--simulated", help="In simulated time, by mode, policy, sessions, seed and load, from half to 1.2 of it."
        ),
    ] = False,
    kv_blocks: Annotated[int | None, typer.Option(min=8, help="Blocks of the engine; few make memory scarce.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Another seed gives another trace.")] = 0,
    profile: options.Profile = None,
    config: options.ConfigFile = None,
    assignments: options.Assignments = None,
    model: options.Model = None,
    as_json: options.AsJson = False,
) -> None:
    """TTFT of streamed prompts by policy, against waiting for the whole context."""
    from command_line.bench import streaming_run, streaming_simulated_run

    loads = streaming_run.load_shares(load)
    if simulated:
        drawn = {"mode": mode.value, "sessions": sessions, "seed": seed}
        names = streaming_run.policy_names(policy or streaming_simulated_run.POLICIES_SHOWN)
        asyncio.run(streaming_simulated_run.bench_streaming_simulated(drawn, names, loads, as_json=as_json))
        return
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
    names = streaming_run.policy_names(policy or ())
    asyncio.run(streaming_run.bench_streaming(loaded, workload, names, loads, rounds, as_json=as_json))
