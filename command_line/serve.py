"""`rachis serve`: one service in the foreground, until Ctrl-C or SIGTERM."""

import asyncio
import json
import signal
from contextlib import suppress

from rich.markup import escape

from cluster_configs.loading import LoadedConfig
from cluster_core.clock import monotonic_s
from command_line.output import out, phases, print_json
from control_plane.service.launch import Service, running_service
from control_plane.service.state import StateFile


async def serve(loaded: LoadedConfig, state_file: StateFile, *, as_json: bool) -> None:
    """Serves until a signal. Raises StartError when it does not come up."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    started_s = monotonic_s()
    if as_json:
        await _serve_for_machines(loaded, state_file, stopped, started_s)
    else:
        await _serve_for_people(loaded, state_file, stopped, started_s)


async def _serve_for_people(
    loaded: LoadedConfig, state_file: StateFile, stopped: asyncio.Event, started_s: float
) -> None:
    with phases() as display:
        service = running_service(loaded, state_file, display.show)
        running = await _enter_unless(service, stopped)
    if running is None:
        return
    try:
        out.print(f"serving {loaded.config.model.served_name} on {running.address} after {_since(started_s):.1f} s")
        for worker in running.workers:
            out.print(f"  {worker.worker_id:<12} {worker.address:<22} process {worker.pid} on {worker.node}")
        for missing in running.missing():
            out.print(f"  {missing.worker_id:<12} [bold]not ready[/bold]: {escape(missing.detail) or 'starting'}")
        out.print("Ctrl-C stops it")
        await stopped.wait()
    finally:
        out.print("stopping")
        await service.__aexit__(None, None, None)
    out.print("stopped")


async def _serve_for_machines(
    loaded: LoadedConfig, state_file: StateFile, stopped: asyncio.Event, started_s: float
) -> None:
    seen: dict[str, str] = {}

    def on_phase(part: str, phase: str) -> None:
        if seen.get(part) != phase:
            seen[part] = phase
            print(json.dumps({"event": "phase", "part": part, "phase": phase}), flush=True)

    service = running_service(loaded, state_file, on_phase)
    running = await _enter_unless(service, stopped)
    if running is None:
        print_json({"event": "stopped", "served": False})
        return
    try:
        missing = {worker.worker_id: worker.detail for worker in running.missing()}
        ready = {
            "event": "ready", "address": running.address, "service_id": running.service_id, "missing": missing
        }  # fmt: skip
        print(json.dumps({**ready, "start_s": round(_since(started_s), 3)}), flush=True)
        await stopped.wait()
    finally:
        await service.__aexit__(None, None, None)
    print_json({"event": "stopped", "served": True, "ran_s": round(_since(started_s), 3)})


async def _enter_unless(service, stopped: asyncio.Event) -> Service | None:  # type: ignore[no-untyped-def]
    """Enters the service; a signal meanwhile takes down what was up so far and gives None."""
    entering = asyncio.create_task(service.__aenter__())
    stopping = asyncio.create_task(stopped.wait())
    await asyncio.wait({entering, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if entering.done():
        running: Service = entering.result()
        return running
    entering.cancel()
    with suppress(asyncio.CancelledError):
        await entering
    return None


def _since(started_s: float) -> float:
    return monotonic_s() - started_s
