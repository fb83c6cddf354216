"""Options that several commands share, and the configuration they make."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from cluster_configs import loading
from cluster_configs.loading import LoadedConfig
from control_plane.service.state import StateFile, state_folder

Profile = Annotated[str | None, typer.Option("--profile", help="Profile of the service, for example cpu-local.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="YAML file over the profile.")]
Assignments = Annotated[list[str] | None, typer.Option("--set", help="One value, for example router.port=7000.")]
Model = Annotated[str | None, typer.Option("--model", help="Hugging Face id or folder; default is the built-in model.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object as the last line of standard output.")]
Address = Annotated[
    str | None, typer.Option("--address", help="host:port of a router; default is the service that runs here.")
]
Prompt = Annotated[str | None, typer.Argument(help="The prompt; - reads standard input.")]
Chat = Annotated[bool, typer.Option("--chat", help="The prompt is a user's chat message.")]
Tokens = Annotated[str | None, typer.Option("--tokens", help="Token ids instead of a text, for example 1,2,3.")]
CacheSalt = Annotated[
    str, typer.Option("--cache-salt", "--salt", help="Share cached KV only with prompts of the same salt.")
]


# Commands that show or measure the way through both pools; `--set` may say otherwise.
BOTH_POOLS = {"placement.disaggregation": "always"}


def load_config(
    profile: str | None,
    config: Path | None,
    assignments: list[str] | None,
    model: str | None,
    extra: dict[str, Any] | None = None,
) -> LoadedConfig:
    """The configuration that a command's flags ask for. Raises ConfigError."""
    flags = {**(extra or {}), **loading.parse_assignments(assignments or [])}
    if model is not None:
        flags["model.path"] = model
    return loading.load(profile=profile, file=config, flags=flags, environment=os.environ)


def names_service(environment: Mapping[str, str]) -> bool:
    """Whether the environment says which service is meant, by a profile or a file."""
    return bool(environment.get("RACHIS_PROFILE") or environment.get("RACHIS_CONFIG"))


def state_file() -> StateFile:
    return StateFile(state_folder(os.environ))
