"""`rachis config`: the configuration in force and where each value comes from, and the profiles there are."""

import json

import typer

from command_line import options
from command_line.output import out, print_json, print_table


def register(app: typer.Typer) -> None:
    config = typer.Typer(help="The configuration.", no_args_is_help=True)
    config.command("show")(show_command)
    config.command("profiles")(profiles_command)
    app.add_typer(config, name="config")


def show_command(
    profile: options.Profile = None,
    config: options.ConfigFile = None,
    assignments: options.Assignments = None,
    model: options.Model = None,
    as_json: options.AsJson = False,
) -> None:
    """Print the configuration in force, and where each value comes from."""
    from cluster_configs import loading

    loaded = options.load_config(profile, config, assignments, model)
    if as_json:
        print_json(
            {entry.key: {"value": loading.masked(entry.value), "source": entry.source} for entry in loaded.entries}
        )
        return
    rows = [(entry.key, json.dumps(loading.masked(entry.value)), entry.source) for entry in loaded.entries]
    print_table("", ("key", "value", "from"), rows)


def profiles_command(as_json: options.AsJson = False) -> None:
    """List the profiles."""
    from cluster_configs import loading

    names = loading.profile_names()
    if as_json:
        print_json({"profiles": names})
    else:
        out.print("\n".join(names))
