"""`rachis gateway`: the HTTP APIs of OpenAI and Anthropic for a running service, by vLLM's own front."""

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cluster_core import event_log
from cluster_core.errors import ConfigError
from command_line import options
from command_line.lossy_output import lossy_output
from command_line.output import out

if TYPE_CHECKING:
    from cluster_configs.schema import RachisConfig

_DEFAULT_PORT = 8000


def register(app: typer.Typer) -> None:
    app.command(
        "gateway",
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )(gateway_command)


def gateway_command(
    context: typer.Context,
    address: options.Addresses = None,
    host: Annotated[str, typer.Option(help="Address that HTTP is served on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Several gateways may share a port.")] = _DEFAULT_PORT,
    wait_s: Annotated[float, typer.Option(min=0.0, help="How long a router with a worker is waited for.")] = 300.0,
    redis: Annotated[
        str, typer.Option(help="URL where responses are stored; - reads it from standard input; default: nowhere.")
    ] = "",
    assignments: options.Assignments = None,
    log_file: Annotated[Path | None, typer.Option(hidden=True, help="Events go there, not to standard error.")] = None,
    service: Annotated[str, typer.Option(hidden=True, help="Whose they are.")] = "",
    as_json: options.AsJson = False,
) -> None:
    """HTTP for a running service: the APIs of OpenAI and Anthropic, as `vllm serve` answers them.

    Options that are not listed here go to vLLM's front, such as --chat-template, --tool-call-parser,
    --enable-auto-tool-choice, --reasoning-parser, --served-model-name, --api-key. Keys of --set are those of
    `gateway.websocket` and `gateway.stored_responses`, see docs/http.md; of `security` the secret where the
    service has API keys, and certificates, see docs/access.md; `log_level` and `log_format`, see docs/logs.md.
    """
    # Imported here: no other command needs it.
    from cluster_configs.exposure import check_gateway_exposure
    from control_plane.gateway.gateway import run

    def listening(model: str, url: str) -> None:
        if as_json:
            print(json.dumps({"event": "listening", "model": model, "url": url}), flush=True)
            return
        out.print(f"HTTP for {model} on {url}", markup=False)
        out.print("Ctrl-C stops it")

    config = _config(host, port, assignments or [])
    check_gateway_exposure(config.security, config.gateway.host)
    serving = run(
        options.running_address(address),
        config.gateway,
        config.security,
        context.args,
        redis_url=_redis_url(redis),
        wait_s=wait_s,
        on_listening=listening,
    )
    only_there = log_file is not None
    with (
        lossy_output(),
        event_log.logged(service, "gateway", config.log_rules, log_file, only_there=only_there),
    ):
        asyncio.run(serving)


def _redis_url(given: str) -> str:
    """A password has no place among a process's arguments, where all users of the host see it."""
    return sys.stdin.readline().strip() if given == "-" else given


def _config(host: str, port: int, assignments: list[str]) -> "RachisConfig":
    """Of the configuration in force here, with `--set`. Raises ConfigError."""
    # Imported here: the schema takes as long as everything else at the start of a command.
    from cluster_configs.schema import GATEWAY_SECURITY

    own = ("gateway.", "log_level=", "log_format=", *(f"security.{name}=" for name in GATEWAY_SECURITY))
    for assignment in assignments:
        if not assignment.startswith(own):
            raise ConfigError("a gateway is told its own keys only: gateway.websocket.…", field="--set")
    extra = {"gateway.host": host, "gateway.port": port}
    return options.load_config(None, None, assignments, None, extra).config
