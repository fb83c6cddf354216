"""`rachis serve`: one service in the foreground, until Ctrl-C or SIGTERM."""

import asyncio
import json
import signal
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from cluster_core.clock import monotonic_s
from cluster_core.errors import StartError
from command_line import options
from command_line.lossy_output import lossy_output
from command_line.output import computes_nothing, out, phases, print_json

if TYPE_CHECKING:
    from control_plane.service.launch import OnPhase, Service

# Up inside the block; hears what each part is doing.
StartService = Callable[["OnPhase"], AbstractAsyncContextManager["Service"]]


def register(app: typer.Typer) -> None:
    app.command("serve")(serve_command)


def serve_command(
    profile: options.Profile = None,
    config: options.ConfigFile = None,
    assignments: options.Assignments = None,
    model: options.Model = None,
    address: Annotated[
        str | None, typer.Option("--address", help="Ray cluster to join; auto: the one of this host. Default: its own.")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Bring a service up and serve until Ctrl-C or SIGTERM."""
    # Imported here: they bring Ray and NumPy, and hardly any other command needs them.
    from cluster_sim.costs import catalog
    from control_plane.service.launch import running_service

    joined = {"ray.address": address} if address is not None else None
    loaded = options.load_config(profile, config, assignments, model, joined)
    options.check_own_port(loaded.config.router)
    cost_model = loaded.config.engine.cost_model
    if cost_model is not None:
        # What is not there is said before anything is started.
        catalog.load(cost_model)
    start = partial(running_service, loaded, options.state_file())
    asyncio.run(serve(loaded.config.model.served_name, start, imitates=cost_model or "", as_json=as_json))


async def serve(model_name: str, start: StartService, *, imitates: str = "", as_json: bool) -> None:
    """Serves until a signal. imitates: the cost model of imitated GPUs. Raises StartError when it does not come up."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    started_s = monotonic_s()
    with lossy_output():
        if as_json:
            await _serve_for_machines(start, stopped, started_s, imitates)
        else:
            await _serve_for_people(model_name, start, stopped, started_s, imitates)


async def _serve_for_people(
    model_name: str, start: StartService, stopped: asyncio.Event, started_s: float, imitates: str
) -> None:
    with phases() as display:
        service = start(display.show)
        running = await _enter_unless(service, stopped)
    if running is None:
        return
    try:
        out.print(f"serving {model_name} on {running.address} after {_since(started_s):.1f} s", markup=False)
        if running.admin_address != running.address:
            out.print(f"  administration on {running.admin_address}", markup=False)
        if imitates:
            out.print(f"  [bold]{escape(computes_nothing(imitates))}[/bold]")
        for worker in running.workers:
            out.print(
                f"  {worker.worker_id:<12} {worker.address:<22} process {worker.pid} on {worker.node}", markup=False
            )
        for missing in running.missing():
            out.print(f"  {missing.worker_id:<12} [bold]not ready[/bold]: {escape(missing.detail) or 'starting'}")
        if running.gateways is not None:
            out.print("  HTTP follows in half a minute")
        if running.is_open:
            out.print("  open: without keys whoever reaches it may do everything; see docs/access.md")
        out.print("Ctrl-C stops it")
        await _until_ended(running, stopped, lambda url: out.print(f"HTTP on {url}", markup=False))
    finally:
        out.print("stopping")
        await service.__aexit__(None, None, None)
    out.print("stopped")


async def _serve_for_machines(start: StartService, stopped: asyncio.Event, started_s: float, imitates: str) -> None:
    seen: dict[str, str] = {}

    def on_phase(part: str, phase: str) -> None:
        if seen.get(part) != phase:
            seen[part] = phase
            print(json.dumps({"event": "phase", "part": part, "phase": phase}), flush=True)

    service = start(on_phase)
    running = await _enter_unless(service, stopped)
    if running is None:
        print_json({"event": "stopped", "served": False})
        return
    try:
        missing = {worker.worker_id: worker.detail for worker in running.missing()}
        ready = {
            "event": "ready", "address": running.address, "admin_address": running.admin_address,
            "service_id": running.service_id, "missing": missing, "open": running.is_open, "imitates": imitates,
        }  # fmt: skip
        print(json.dumps({**ready, "start_s": round(_since(started_s), 3)}), flush=True)
        await _until_ended(running, stopped, lambda url: print(json.dumps({"event": "http", "url": url}), flush=True))
    finally:
        await service.__aexit__(None, None, None)
    print_json({"event": "stopped", "served": True, "ran_s": round(_since(started_s), 3)})


async def _until_ended(running: "Service", stopped: asyncio.Event, on_http: Callable[[str], None]) -> None:
    """on_http: hears once where HTTP is served. Raises StartError where another one has taken the service's name."""
    ends = [asyncio.create_task(event.wait()) for event in (stopped, running.replaced)]
    telling = asyncio.create_task(_tell_http(running, on_http))
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (*ends, telling):
            task.cancel()
    if running.replaced.is_set():
        raise StartError(
            "another `rachis serve` has taken this service's name, as this one did not renew it in time: it ends, and "
            "its workers are left to that one",
            field="service.name",
        )


async def _tell_http(running: "Service", on_http: Callable[[str], None]) -> None:
    if running.gateways is not None:
        on_http(await running.gateways.first_url())


async def _enter_unless(service: AbstractAsyncContextManager["Service"], stopped: asyncio.Event) -> "Service | None":
    """Enters the service; a signal meanwhile takes down what was up so far and gives None."""
    entering = asyncio.create_task(service.__aenter__())
    stopping = asyncio.create_task(stopped.wait())
    await asyncio.wait({entering, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if entering.done():
        return entering.result()
    entering.cancel()
    with suppress(asyncio.CancelledError):
        await entering
    return None


def _since(started_s: float) -> float:
    return monotonic_s() - started_s
