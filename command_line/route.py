"""`rachis route`: one more router for a service that runs already, on this host or another."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster_core import event_log
from cluster_core.errors import ConfigError
from command_line import options
from command_line.lossy_output import lossy_output
from command_line.output import out, print_json

if TYPE_CHECKING:
    from cluster_configs.loading import LoadedConfig
    from cluster_configs.schema import RouterSection

# Beyond the time that requests have, for all else that a router ends.
_SPARE_STOP_S = 30.0


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
    if processes > 1:
        given = options.given(profile, config, assignments, model)
        run = route_together(loaded, given, processes, as_json=as_json)
    else:
        run = route(loaded, as_json=as_json)
    name = "route" if number is None else f"route-{number}"
    file = options.state_file().folder / f"router-{name}.log"
    with lossy_output(), event_log.logged(loaded.config.service.name, name, loaded.config.log_rules, file):
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

    config, redis_url = loaded.config, _redis_of_the_service(loaded)
    stopped = _signalled()
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
            out.print(f"routing for {config.service.name} on {router.address}; metrics on {router.metrics.url}")
            if router.admin_address != router.address:
                out.print(f"  administration on {router.admin_address}")
            out.print("Ctrl-C stops it")
        await stopped.wait()
    finally:
        await router.stop()
    if as_json:
        print_json({"event": "stopped"})


async def route_together(loaded: "LoadedConfig", given: Sequence[str], processes: int, *, as_json: bool) -> None:
    """So many routers behind one port until a signal, each started again when it ends. given: options of the command
    line that say the configuration.

    Raises ConfigError as `route` does, and where there are too few ports; StartError where one does not come up.
    """
    # Imported here, as what a router imports.
    from control_plane.service.kept_processes import Kept, KeptProcesses

    _redis_of_the_service(loaded)
    settings = _settings_together(loaded.config.router, processes)
    stopped = _signalled()

    def command(number: int) -> tuple[str, ...]:
        own = (
            part for key, value in settings[number].items() for part in ("--set", f"router.{key}={json.dumps(value)}")
        )
        return (sys.executable, "-m", "command_line.main", "route", *given, *own, "--number", str(number), "--json")

    routers = KeptProcesses(Kept("router", processes, command))
    routers.start()
    try:
        up = asyncio.create_task(routers.all_up(at_once=True))
        if await _done_before(up, stopped):
            await up
            _say_together(loaded, [routers.listening[number] for number in range(processes)], as_json=as_json)
            await stopped.wait()
    finally:
        await routers.stop(loaded.config.router.drain_timeout_s + _SPARE_STOP_S)
    if as_json:
        print_json({"event": "stopped"})


def _settings_together(section: "RouterSection", processes: int) -> list[dict[str, int | bool]]:
    """Of each router. Its ports are held here: one that is started again finds them again, and a port to be shared that
    somebody else has is found out. Raises ConfigError, StartError."""
    # Imported here, as what a router imports.
    from cluster_configs.listening import metrics_of, own_ports
    from cluster_core.ports import PortRange, hold_port

    host = section.host.strip("[]")
    hosts = {"admin_port": section.admin_host, "metrics_port": metrics_of(section).host}
    own = [own_ports(section, number, processes) for number in range(processes)]
    port = hold_port(host, PortRange(section.port, section.port) if section.port else None, "router.port")
    held = [{name: at or hold_port(hosts[name].strip("[]")) for name, at in ports.items()} for ports in own]
    return [{"port": port, "share_port": True, **ports} for ports in held]


def _say_together(loaded: "LoadedConfig", routers: list[Any], *, as_json: bool) -> None:
    service, first = loaded.config.service.name, routers[0]
    if as_json:
        event = {"event": "listening", "address": first["address"], "admin_address": first["admin_address"]}
        print(json.dumps({**event, "service_id": service, "routers": routers}), flush=True)
        return
    out.print(f"routing for {service} on {first['address']}, {len(routers)} processes")
    for router in routers:
        out.print(
            f"  process {router['pid']}: administration on {router['admin_address']}, metrics on {router['metrics']}"
        )
    out.print("Ctrl-C stops them")


def _redis_of_the_service(loaded: "LoadedConfig") -> str:
    """Raises ConfigError where the configuration does not say it, or who may reach this router."""
    from cluster_configs.exposure import check_exposure

    config = loaded.config
    check_exposure(config)
    if not config.service.name:
        raise ConfigError("must be that of the running service", field="service.name")
    if config.redis.url is None:
        raise ConfigError("must be that of the running service: an embedded server is its own alone", field="redis.url")
    return config.redis.url


def _signalled() -> asyncio.Event:
    """Set by Ctrl-C or SIGTERM from now on."""
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    return stopped


async def _done_before(task: asyncio.Task[None], stopped: asyncio.Event) -> bool:
    """Whether it is; else it is cancelled."""
    stopping = asyncio.create_task(stopped.wait())
    await asyncio.wait((task, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not task.done():
        task.cancel()
        return False
    return True
