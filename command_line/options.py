"""Options that several commands share, and what is made of them: a configuration, a prompt, an address."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rachis import chat_prompt, text_prompt, token_prompt
from rachis.v1 import generation_pb2 as generation

from cluster_core.errors import ConfigError
from control_plane.service.state import StateFile, state_folder

if TYPE_CHECKING:
    from cluster_configs.loading import LoadedConfig
    from cluster_configs.schema import RouterSection

Profile = Annotated[str | None, typer.Option("--profile", help="Profile of the service, for example cpu-local.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="YAML file over the profile.")]
Assignments = Annotated[list[str] | None, typer.Option("--set", help="One value, for example router.port=7000.")]
Model = Annotated[str | None, typer.Option("--model", help="Hugging Face id or folder; default is the built-in model.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object as the last line of standard output.")]


def _one_router(address: str | None) -> str | None:
    """Raises ConfigError for a list: what is asked of one router, another one may answer differently."""
    if address is not None and "," in address:
        raise ConfigError("takes one router here, host:port", field="--address")
    return address


Address = Annotated[
    str | None,
    typer.Option(
        "--address", help="host:port of a router; default is the service that runs here.", callback=_one_router
    ),
]
Addresses = Annotated[
    str | None,
    typer.Option("--address", help="host:port of a router, or several ip:port; default is the service that runs here."),
]
Prompt = Annotated[str | None, typer.Argument(help="The prompt; - reads standard input.")]
Chat = Annotated[bool, typer.Option("--chat", help="The prompt is a user's chat message.")]
Tokens = Annotated[str | None, typer.Option("--tokens", help="Token ids instead of a text, for example 1,2,3.")]
AskedModel = Annotated[
    str, typer.Option("--model", help="A LoRA adapter of the service, by its name; by default the model alone.")
]
CacheSalt = Annotated[
    str, typer.Option("--cache-salt", "--salt", help="Share cached KV only with prompts of the same salt.")
]

UINT32 = 2**32 - 1
UINT64 = 2**64 - 1
# Commands that show or measure the way through both pools; `--set` may say otherwise.
BOTH_POOLS = {"placement.disaggregation": "always"}


def load_config(
    profile: str | None,
    config: Path | None,
    assignments: list[str] | None,
    model: str | None,
    extra: dict[str, Any] | None = None,
) -> "LoadedConfig":
    """The configuration that a command's flags ask for. Raises ConfigError."""
    # Imported here: the schema takes as long as everything else at the start of a command, and many need none.
    from cluster_configs import loading

    flags = {**(extra or {}), **loading.parse_assignments(assignments or [])}
    if model is not None:
        flags["model.path"] = model
    return loading.load(profile=profile, file=config, flags=flags, environment=os.environ)


def check_own_port(section: "RouterSection", *, is_kept: bool = False) -> None:
    """is_kept: by a process that has found out who else has the port. Raises ConfigError."""
    if section.share_port and not is_kept:
        raise ConfigError("is set by `rachis route --processes` alone, for its own routers", field="router.share_port")


def names_service(environment: Mapping[str, str]) -> bool:
    """Whether the environment says which service is meant, by a profile or a file."""
    return bool(environment.get("RACHIS_PROFILE") or environment.get("RACHIS_CONFIG"))


def state_file() -> StateFile:
    return StateFile(state_folder(os.environ))


def running_address(address: str | None) -> str:
    """The address given, else that of the service that runs here. Raises ConfigError where none runs."""
    if address is not None:
        return address
    running = state_file().read()
    if running is None or not running.address:
        raise ConfigError("no service runs here; start one with `rachis serve`, or give --address", field="--address")
    return running.address


def admin_address(address: str | None) -> str:
    """Likewise, where administration is answered. Raises ConfigError."""
    running = state_file().read() if address is None else None
    return running.admin_address if running is not None and running.admin_address else running_address(address)


def prompt_input(prompt: str | None, *, chat: bool, tokens: str | None) -> generation.PromptInput:
    """The prompt of a text, a chat message, standard input or token ids. Raises ConfigError."""
    if tokens is not None:
        try:
            return token_prompt([int(part) for part in tokens.split(",") if part.strip()])
        except ValueError:
            raise ConfigError(f"must be whole numbers from 0 to {UINT32}, with commas", field="--tokens") from None
    if prompt is None:
        raise ConfigError("give a prompt, - for standard input, or --tokens", field="prompt")
    try:
        text = sys.stdin.read() if prompt == "-" else prompt
        text.encode()
    except UnicodeError:
        raise ConfigError("is not valid UTF-8", field="prompt") from None
    return chat_prompt([{"role": "user", "content": text}]) if chat else text_prompt(text)


def whole_number(value: int, option: str, highest: int = UINT32) -> int:
    """The value, where it is from 0 to `highest`. Raises ConfigError."""
    if not 0 <= value <= highest:
        raise ConfigError(f"must be from 0 to {highest}, got {value}", field=option)
    return value
