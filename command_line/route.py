"""`rachis route`: one more router for a service that runs already, on this host or another."""

import asyncio
import json
import os
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from cluster_core import event_log
from cluster_core.errors import ConfigError
from command_line import options
from command_line.lossy_output import lossy_output
from command_line.output import out, print_json
from command_line.route_together import route_together, settings_together
from command_line.signalled import signalled

if TYPE_CHECKING:
    from cluster_configs.loading import LoadedConfig


def register(app: typer.Typer) -> None:
    app.command("route")(route_command)


def route_command(
    profile: options.Profile = None,
    config: options.ConfigFile = None,
    assignments: options.Assignments = None,
    model: options.Model = None,
    processes: Annotated[int, typer.Option(min=1, max=64, help="Routers that share router.port, a core each.")] = 1,
    number: Annotated[int | None, typer.Option(min=0, hidden=True, help="Which of several this one is.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """One more router for a running service: the same service.name, redis.url and model, its own router.port."""
    loaded = options.load_config(profile, config, assignments, model)
    folder, section = options.state_file().folder, loaded.config.router
    if processes > 1:
        if number is not None:
            raise ConfigError("is one of several, and keeps none", field="--number")
        redis_of_the_service(loaded)
        routers = settings_together(section, processes)
        name = f"route-{routers[0]['port']}"
        run = route_together(loaded, routers, folder, as_json=as_json)
    else:
        options.check_own_port(section, is_kept=number is not None)
        name = f"route-{section.port}" if number is None else f"route-{section.port}-{number}"
        run = route(loaded, as_json=as_json)
    with (
        lossy_output(),
        event_log.logged(loaded.config.service.name, name, loaded.config.log_rules, folder / f"router-{name}.log"),
    ):
        asyncio.run(run)


async def route(loaded: "LoadedConfig", *, as_json: bool) -> None:
    """Routes until a signal; it is not ready before it knows a decode worker of the service.

    Raises ConfigError where the configuration does not say which service, StartError when it cannot listen.
    """
    # Imported here: it takes long, and no other command needs it.
    from cluster_wire.redis_client import connect
    from control_plane.intake.tokenization import Tokenizer
    from control_plane.server.composition import RouterPorts, build_router
    from control_plane.service.garbage import collect_rarely

    config, redis_url = loaded.config, redis_of_the_service(loaded)
    stopped = signalled()
    ports = RouterPorts(partial(connect, redis_url), tokenizer=partial(Tokenizer, beside_models=False))
    router = build_router(loaded, config.service.name, ports)
    await router.start()
    collect_rarely()
    try:
        if as_json:
            addresses = {
                "address": router.address,
                "admin_address": router.admin_address,
                "metrics": router.metrics.url,
            }
            listening = {"event": "listening", **addresses, "service_id": config.service.name, "pid": os.getpid()}
            print(json.dumps(listening), flush=True)
        else:
            out.print(
                f"routing for {config.service.name} on {router.address}; metrics on {router.metrics.url}", markup=False
            )
            if router.admin_address != router.address:
                out.print(f"  administration on {router.admin_address}", markup=False)
            out.print("Ctrl-C stops it")
        await stopped.wait()
    finally:
        await router.stop()
    if as_json:
        print_json({"event": "stopped"})


def redis_of_the_service(loaded: "LoadedConfig") -> str:
    """Raises ConfigError where the configuration does not say it, or who may reach this router."""
    from cluster_configs.exposure import check_exposure

    config = loaded.config
    check_exposure(config)
    if not config.service.name:
        raise ConfigError("must be that of the running service", field="service.name")
    if config.redis.url is None:
        raise ConfigError("must be that of the running service: an embedded server is its own alone", field="redis.url")
    return config.redis.url
