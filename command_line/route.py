"""`rachis route`: one more router for a service that runs already, on this host or another."""

import asyncio
import json
import signal
from functools import partial
from typing import TYPE_CHECKING

import typer

from cluster_core import event_log
from cluster_core.errors import ConfigError
from command_line import options
from command_line.lossy_output import lossy_output
from command_line.output import out, print_json

if TYPE_CHECKING:
    from cluster_configs.loading import LoadedConfig


def register(app: typer.Typer) -> None:
    app.command("route")(route_command)


def route_command(
    profile: options.Profile = None,
    config: options.ConfigFile = None,
    assignments: options.Assignments = None,
    model: options.Model = None,
    as_json: options.AsJson = False,
) -> None:
    """One more router for a running service: the same service.name, redis.url and model, its own router.port."""
    loaded = options.load_config(profile, config, assignments, model)
    rules, file = loaded.config.log_rules, options.state_file().folder / "router-route.log"
    with lossy_output(), event_log.logged(loaded.config.service.name, "route", rules, file):
        asyncio.run(route(loaded, as_json=as_json))


async def route(loaded: "LoadedConfig", *, as_json: bool) -> None:
    """Routes until a signal; it is not ready before it knows a decode worker of the service.

    Raises ConfigError where the configuration does not say which service, StartError when it cannot listen.
    """
    # Imported here: it takes long, and no other command needs it.
    from cluster_configs.exposure import check_exposure
    from cluster_wire.redis_client import connect
    from control_plane.intake.tokenization import Tokenizer
    from control_plane.server.composition import RouterPorts, build_router
    from control_plane.service.garbage import collect_rarely

    config = loaded.config
    check_exposure(config)
    if not config.service.name:
        raise ConfigError("must be that of the running service", field="service.name")
    if config.redis.url is None:
        raise ConfigError("must be that of the running service: an embedded server is its own alone", field="redis.url")
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    ports = RouterPorts(partial(connect, config.redis.url), tokenizer=partial(Tokenizer, beside_models=False))
    router = build_router(loaded, config.service.name, ports)
    await router.start()
    collect_rarely()
    try:
        if as_json:
            addresses = {"address": router.address, "admin_address": router.admin_address}
            listening = {"event": "listening", **addresses, "service_id": config.service.name}
            print(json.dumps(listening), flush=True)
        else:
            out.print(f"routing for {config.service.name} on {router.address}; metrics on {router.metrics.url}")
            if router.admin_address != router.address:
                out.print(f"  administration on {router.admin_address}")
            out.print("Ctrl-C stops it")
        await stopped.wait()
    finally:
        await router.stop()
    if as_json:
        print_json({"event": "stopped"})
