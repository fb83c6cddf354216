"""The options of `rachis bench roles`; roles_run.py does the work."""

import asyncio
from typing import Annotated

import typer

from command_line import options

_SHORT_TOKENS = 16
# Of workers that do both, by the objectives; what is set goes before it.
_OWN = {
    "pools.prefill.workers": 0,
    "pools.decode.workers": 0,
    "pools.shared.workers": 4,
    "pools.shared.cpus_per_worker": 0.25,
    "objectives.ttft_s": 10.0,
    "objectives.tpot_s": 0.25,
}


def register(bench: typer.Typer) -> None:
    bench.command("roles")(roles_command)


def roles_command(
    seconds: Annotated[float, typer.Option(min=10, max=3600, help="Of each of the three phases.")] = 60.0,
    prompts_per_s: Annotated[float, typer.Option(min=0.1, max=1000, help="Long prompts a second.")] = 4.0,
    prompt_tokens: Annotated[int, typer.Option(min=16, max=1_000_000, help="Of a long prompt.")] = 2000,
    answers_per_s: Annotated[float, typer.Option(min=0.1, max=1000, help="Long answers a second.")] = 1.0,
    answer_tokens: Annotated[int, typer.Option(min=16, max=1_000_000, help="Of a long answer.")] = 200,
    seed: Annotated[int, typer.Option(min=0, help="Another seed gives other prompts at other times.")] = 0,
    profile: options.Profile = None,
    config: options.ConfigFile = None,
    assignments: options.Assignments = None,
    model: options.Model = None,
    as_json: options.AsJson = False,
) -> None:
    """Whether roles of workers that do both follow a load that shifts, on an own service of four of them."""
    from benchmarks.roles import LONG_ANSWERS, LONG_PROMPTS, Kind, Shift
    from command_line.bench import roles_run

    loaded = options.load_config(profile, config, assignments, model, _OWN)
    kinds = {
        LONG_PROMPTS: Kind(prompt_tokens, _SHORT_TOKENS, prompts_per_s),
        LONG_ANSWERS: Kind(_SHORT_TOKENS, answer_tokens, answers_per_s),
    }
    shift = Shift(kinds, seconds, seed)
    asyncio.run(roles_run.bench_roles(loaded, options.state_file(), shift, as_json=as_json))
