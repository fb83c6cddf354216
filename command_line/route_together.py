"""`rachis route --processes`: several routers behind one port, each started again when it ends."""

import asyncio
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from command_line.output import out, print_json
from command_line.signalled import done_before, signalled

if TYPE_CHECKING:
    from cluster_configs.loading import LoadedConfig
    from cluster_configs.schema import RouterSection

# Beyond the time that requests have, for all else that a router ends; and of routers that are not up yet.
_SPARE_STOP_S = 30.0
_STARTING_STOP_S = 5.0
Settings = Mapping[str, int | bool]


def settings_together(section: "RouterSection", processes: int) -> list[Settings]:
    """What differs of `section` for each router.

    Its ports are held here: one that is started again finds them, and one that somebody else has is found out, as who
    shares a port is never told. Raises ConfigError, StartError.
    """
    # Imported here, as what a router imports.
    from cluster_configs.listening import metrics_of, own_ports
    from cluster_core.ports import PortRange, hold_port

    hosts = {"port": section.host, "admin_port": section.admin_host, "metrics_port": metrics_of(section).host}

    def held(name: str, port: int) -> int:
        return hold_port(hosts[name], PortRange(port, port) if port else None, f"router.{name}")

    own = [own_ports(section, number, processes) for number in range(processes)]
    port = held("port", section.port)
    return [{"port": port, "share_port": True, **{name: held(name, at) for name, at in ports.items()}} for ports in own]


async def route_together(loaded: "LoadedConfig", settings: list[Settings], folder: Path, *, as_json: bool) -> None:
    """Until a signal. settings: see `settings_together`. folder: of the configuration that all are started with,
    whatever becomes of the files that it was read from. Raises StartError where one does not come up."""
    # Imported here, as what a router imports.
    from control_plane.service.kept_processes import Kept, KeptProcesses

    stopped, is_up = signalled(), False
    file = folder / f"route-{settings[0]['port']}.json"

    def command(number: int) -> tuple[str, ...]:
        own = (f"router.{key}={json.dumps(value)}" for key, value in settings[number].items())
        options = ("--config", str(file), *(part for each in own for part in ("--set", each)))
        return (sys.executable, "-m", "command_line.main", "route", *options, "--number", str(number), "--json")

    def changed(number: int, event: Mapping[str, Any]) -> None:
        if is_up and as_json:
            print(json.dumps({**event, "event": f"router_{event['event']}", "number": number}), flush=True)

    with _written(file, loaded):
        kept = Kept("router", len(settings), command, environment=_environment())
        routers = KeptProcesses(kept, on_change=changed)
        routers.start()
        try:
            if await done_before(up := asyncio.create_task(routers.all_up(at_once=True)), stopped):
                await up
                _say(loaded, [routers.listening[number] for number in range(len(settings))], as_json=as_json)
                is_up = True
                await stopped.wait()
        finally:
            drain_s = loaded.config.router.drain_timeout_s + _SPARE_STOP_S
            await routers.stop(drain_s if is_up else _STARTING_STOP_S)
    if as_json:
        print_json({"event": "stopped"})


@contextmanager
def _written(file: Path, loaded: "LoadedConfig") -> Iterator[None]:
    """For this user alone: it may hold a password."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as writing:
        json.dump(loaded.config.model_dump(mode="json"), writing)
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def _environment() -> Mapping[str, str]:
    """This process's, without what the file says in its place."""
    from cluster_configs.loading import ENVIRONMENT_PREFIX, OTHER_VARIABLES

    kept = OTHER_VARIABLES - {"RACHIS_PROFILE", "RACHIS_CONFIG"}
    return {name: text for name, text in os.environ.items() if name in kept or not name.startswith(ENVIRONMENT_PREFIX)}


def _say(loaded: "LoadedConfig", routers: list[Mapping[str, Any]], *, as_json: bool) -> None:
    service, first = loaded.config.service.name, routers[0]
    if as_json:
        event = {**first, "pid": os.getpid(), "routers": routers}
        print(json.dumps(event), flush=True)
        return
    out.print(f"routing for {service} on {first['address']}, {len(routers)} processes", markup=False)
    for router in routers:
        places = f"administration on {router['admin_address']}, metrics on {router['metrics']}"
        out.print(f"  process {router['pid']}: {places}", markup=False)
    out.print("Ctrl-C stops them")
