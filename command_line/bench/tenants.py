"""The options of `rachis bench tenants`; tenants_run.py does the work."""

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from command_line import options

if TYPE_CHECKING:
    from cluster_configs.loading import LoadedConfig
    from command_line.own_cluster import Places


def register(bench: typer.Typer) -> None:
    bench.command("tenants")(tenants_command)


def tenants_command(
    requests: Annotated[int, typer.Option(min=40, help="Of the tenant that listens, for each kind of sharing.")] = 2000,
    victim_requests: Annotated[int, typer.Option(min=20, help="Of the tenant beside a greedy one.")] = 120,
    pairs: Annotated[int, typer.Option(min=20, help="Of requests with keys and TLS, and without.")] = 400,
    profile: options.Profile = None,
    config: options.ConfigFile = None,
    assignments: options.Assignments = None,
    model: options.Model = None,
    as_json: options.AsJson = False,
) -> None:
    """What tenants find out about each other by time, what one takes from another, and what keys and TLS cost."""
    from command_line.bench import tenants_run
    from command_line.own_cluster import TWO_OF_EACH

    def load(places: "Places") -> "LoadedConfig":
        single = {"pools.prefill.workers": 1, "pools.decode.workers": 1, "service.name": "tenants"}
        extra = {**TWO_OF_EACH, **single, **options.BOTH_POOLS, **places}
        return options.load_config(profile, config, assignments, model, extra)

    asyncio.run(tenants_run.bench_tenants(load, requests, victim_requests, pairs, as_json=as_json))
