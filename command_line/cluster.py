"""The options of `rachis cluster check`; cluster_run.py does the work."""

import os
from pathlib import Path
from typing import Annotated

import typer

from command_line import options
from command_line.errors import USAGE_EXIT_CODE


def register(app: typer.Typer) -> None:
    cluster = typer.Typer(help="Clusters of many hosts, brought up by `ray up`.", no_args_is_help=True)
    cluster.command("check")(check_command)
    app.add_typer(cluster, name="cluster")


def check_command(
    file: Annotated[Path, typer.Argument(help="For `ray up`, such as cluster_configs/ray/aws.yaml.")],
    profile: options.Profile = None,
    config: options.ConfigFile = None,
    assignments: options.Assignments = None,
    model: options.Model = None,
    as_json: options.AsJson = False,
) -> None:
    """Check a file for `ray up`, and with --profile or --config the service on it; say what each node would do."""
    from command_line import cluster_run

    service = profile or config or assignments or model or options.names_service(os.environ)
    loaded = options.load_config(profile, config, assignments, model) if service else None
    if not cluster_run.check(file, loaded.config if loaded else None, as_json=as_json):
        raise typer.Exit(USAGE_EXIT_CODE)
