"""`rachis status`: what runs here, what it is doing, and whether anything was left behind."""

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

import grpc
import typer
from rachis import AsyncClient
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import worker_pb2 as wire
from rich.markup import escape

from cluster_core.errors import ConfigError, NotFoundError
from command_line import options
from command_line.output import computes_nothing, out, print_json, print_table
from command_line.router_admin import TIMEOUT_S, phase_name, pool_name
from command_line.status.decode import BATCH_ENTRIES, decode_of, print_decode
from command_line.status.index import index_line, status_of
from command_line.status.ready import ready
from command_line.status.tiers import HOTTEST_PREFIXES, print_tiers, tiers_of
from control_plane.overview import complaints
from control_plane.overview.rows import state_name
from control_plane.service.state import StateFile, leftovers


def register(app: typer.Typer) -> None:
    app.command("status")(status_command)


def status_command(
    tiers: Annotated[
        bool, typer.Option("--tiers", help="What device and host memory saved, and the hottest prefixes.")
    ] = False,
    decode: Annotated[
        bool, typer.Option("--decode", help="How decode workers form their batches, and what waits and why.")
    ] = False,
    worker: Annotated[str | None, typer.Option(help="Show this worker only, for example decode-0.")] = None,
    is_ready: Annotated[
        bool,
        typer.Option(
            "--ready",
            help="Only whether requests are taken, 1 where not; needs no key, and --address may be a gateway's URL.",
        ),
    ] = False,
    address: options.Address = None,
    as_json: options.AsJson = False,
) -> None:
    """Show what runs here."""
    if is_ready:
        if tiers or decode or worker is not None:
            raise ConfigError("is asked alone, without --tiers, --decode or --worker", field="--ready")
        raise typer.Exit(asyncio.run(ready(address, options.state_file(), as_json=as_json)))
    shown = status(address, options.state_file(), tiers=tiers, decode=decode, worker=worker, as_json=as_json)
    raise typer.Exit(asyncio.run(shown))


async def status(
    address: str | None,
    state_file: StateFile,
    *,
    tiers: bool = False,
    decode: bool = False,
    worker: str | None = None,
    as_json: bool,
) -> int:
    """Prints it; returns 0 for a running service or none at all, 1 for leftovers or one that does not answer.

    worker: the only one that is shown. Raises NotFoundError where there is none of that name.
    """
    running = state_file.read()
    address = address or (running.admin_address if running else None)
    if not address:
        return _nothing_runs(as_json, starting=running is not None)
    try:
        async with AsyncClient(address) as client:
            result = await ask(client, address, worker, tiers=tiers, decode=decode)
    except grpc.aio.AioRpcError as error:
        if error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
            raise
        message = f"the router at {address} does not answer: {error.details()}"
        if as_json:
            print_json({"running": False, "address": address, "error": message})
        else:
            out.print(message, markup=False)
        return 1
    if as_json:
        print_json(result)
    else:
        _print(result)
        if tiers:
            print_tiers(result["workers"])
        if decode:
            print_decode(result["workers"])
    return 0


def _nothing_runs(as_json: bool, *, starting: bool) -> int:
    left = [] if starting else leftovers()
    if as_json:
        print_json({"running": False, "starting": starting, "leftover_processes": [process.pid for process in left]})
    elif starting:
        out.print("a service is starting")
    elif left:
        numbers = ", ".join(str(process.pid) for process in left)
        out.print(f"nothing runs, but these processes of a former service are left: {numbers}", markup=False)
    else:
        out.print("nothing runs")
    return 1 if left else 0


async def ask(
    client: AsyncClient, address: str, worker: str | None, *, tiers: bool = False, decode: bool = False
) -> dict[str, Any]:
    """For `--json`. worker: as in `status`. Raises grpc.aio.AioRpcError and NotFoundError."""
    router = await client.router_status()
    index = await client.admin.GetIndexStatus(admin.GetIndexStatusRequest(), timeout=TIMEOUT_S)
    overview = await client.admin.GetOverview(admin.GetOverviewRequest(), timeout=TIMEOUT_S)
    pools = (await client.admin.GetPools(admin.GetPoolsRequest(), timeout=TIMEOUT_S)).pools
    views = await client.workers(
        hottest_prefixes=HOTTEST_PREFIXES if tiers else 0, batch_entries=BATCH_ENTRIES if decode else 0
    )
    if worker is not None:
        views = [_named(worker, views)]
    return {
        "running": True,
        "address": address,
        "service_id": router.service_id,
        "version": router.version,
        "uptime_s": round(router.uptime_s, 1),
        "in_flight_requests": router.in_flight_requests,
        "queued_requests": router.queued_requests,
        "open_sessions": router.open_sessions,
        "outcomes": dict(router.outcomes),
        "poisoned_requests": router.poisoned_requests,
        "memory": [
            {"what": use.what, "used_bytes": use.used_bytes, "limit_bytes": use.limit_bytes, "limit": use.limit}
            for use in router.memory
        ],
        "ttft_s": _times(overview.ttft),
        "tpot_s": _times(overview.tpot),
        "alerts": [
            {
                "name": alert.name,
                "severity": alert.severity,
                "subject": alert.subject,
                "sentence": alert.sentence,
                "runbook": alert.runbook,
            }
            for alert in overview.alerts
        ],
        "registry_connected": router.registry_connected,
        "metrics_address": router.metrics_address,
        "metrics_url": router.metrics_url,
        "pools": {pool_name(pool.pool): _pool(pool) for pool in pools},
        "index": status_of(index),
        "router_overhead_ms": {"p50": round(router.overhead_p50_ms, 3), "p99": round(router.overhead_p99_ms, 3)},
        "missing_features": list(complaints.missing_features(views)),
        "workers": [_worker(view, tiers=tiers, decode=decode) for view in views],
    }


def _worker(view: admin.WorkerView, *, tiers: bool, decode: bool) -> dict[str, Any]:
    return {
        "worker_id": view.registration.worker_id,
        "pool": pool_name(view.registration.pool),
        "imitates": view.registration.model.imitates,
        "missing_features": dict(view.registration.model.missing_features),
        "state": _state(view.registration.state, suspect=view.suspect),
        "version_skew": view.version_skew,
        "phase": view.registration.phase,
        "generation": view.registration.generation,
        "address": view.registration.address,
        "node": view.registration.node,
        "pid": view.registration.pid,
        "answered": view.HasField("load"),
        "running_requests": view.load.running_requests,
        "waiting_requests": view.load.waiting_requests,
        "leased_handoffs": view.load.leased_handoffs,
        "free_blocks": view.load.free_blocks,
        "total_blocks": view.load.total_blocks,
        "open_sessions": view.load.open_sessions,
        "stalled_s": complaints.stalled(view),
        "quarantined_blocks": view.load.quarantined_blocks,
        "free_host_blocks": view.load.free_host_blocks,
        "total_host_blocks": view.load.total_host_blocks,
        "requests": view.counters.requests,
        "prompt_tokens": view.counters.prompt_tokens,
        "generated_tokens": view.counters.generated_tokens,
        "kv_bytes_pulled": view.counters.kv_bytes_pulled,
        "kv_descriptors_pulled": view.counters.kv_descriptors_pulled,
        "handoffs_recomputed": view.counters.handoffs_recomputed,
        "resident_bytes": view.counters.resident_bytes,
        "complaints": [complaint.sentence for complaint in complaints.of_worker(view)],
        **({"tiers": tiers_of(view)} if tiers else {}),
        **({"decode": decode_of(view)} if decode else {}),
    }


def _times(times: admin.TimesOverview) -> dict[str, Any]:
    """None: no request of the last minute has been measured, and nobody has an objective."""
    return {
        "requests": times.requests,
        "p50": times.p50_s if times.requests else None,
        "p90": times.p90_s if times.requests else None,
        "objective": times.objective_s or None,
    }


def _pool(pool: admin.PoolStatus) -> dict[str, Any]:
    return {
        "desired_workers": pool.desired_workers,
        "minimum_workers": pool.minimum_workers,
        "ready_workers": pool.ready_workers,
        "lost_workers": pool.lost_workers,
        "autoscales": pool.autoscales,
        "workers": {
            worker.worker_id: {"phase": phase_name(worker.phase), "detail": worker.detail} for worker in pool.workers
        },
    }


def _named(name: str, views: Sequence[admin.WorkerView]) -> admin.WorkerView:
    for view in views:
        if view.registration.worker_id == name:
            return view
    known = ", ".join(view.registration.worker_id for view in views) or "none"
    raise NotFoundError(f"no worker `{name}`; there are: {known}", field="--worker")


def _state(state: wire.WorkerState.ValueType, *, suspect: bool) -> str:
    name = state_name(state)
    return f"{name} (suspect)" if suspect else name


def _pool_line(name: str, pool: dict[str, Any]) -> str:
    text = f"{name}: {pool['ready_workers']} of {pool['desired_workers']} workers ready"
    if pool["ready_workers"] < pool["minimum_workers"]:
        text = f"[bold]{text}, at least {pool['minimum_workers']} are needed[/bold]"
    if pool["lost_workers"]:
        text += f", {pool['lost_workers']} lost so far"
    late = {worker: each for worker, each in pool["workers"].items() if each["phase"] != "ready"}
    return text + "".join(
        f"\n  {worker} {each['phase']}{': ' + escape(each['detail']) if each['detail'] else ''}"
        for worker, each in late.items()
    )


def _print(result: dict[str, Any]) -> None:
    out.print(
        f"service {result['service_id']} on {result['address']}, up {result['uptime_s']:.0f} s, "
        f"{result['in_flight_requests']} running, {result['queued_requests']} queued, "
        f"outcomes {result['outcomes'] or 'none yet'}, metrics on {result['metrics_url']}",
        markup=False,
    )
    if not result["registry_connected"]:
        out.print("[bold]the registry (Redis) does not answer: the last known workers are used[/bold]")
    for imitates in sorted({worker["imitates"] for worker in result["workers"]} - {""}):
        out.print(f"[bold]{escape(computes_nothing(imitates))}[/bold]")
    for sentence in result["missing_features"]:
        out.print(escape(sentence))
    if result["poisoned_requests"]:
        out.print(f"[bold]requests that are refused because engines died of them: {result['poisoned_requests']}[/bold]")
    for name, pool in result["pools"].items():
        out.print(_pool_line(name, pool))
    out.print(index_line(result["index"]), markup=False)
    for alarm in result["index"]["alarms"]:
        out.print(f"[bold]{escape(alarm)}[/bold]")
    told = (f"{use['what']} {use['used_bytes'] >> 20} of {use['limit_bytes'] >> 20} MiB" for use in result["memory"])
    out.print(f"memory of the router: {', '.join(told)}", markup=False)
    rows = [
        (
            worker["worker_id"],
            worker["node"],
            worker["state"] if worker["state"] != "starting" else worker["phase"],
            worker["running_requests"],
            worker["waiting_requests"],
            worker["leased_handoffs"],
            worker["open_sessions"],
            f"{worker['free_blocks']}/{worker['total_blocks']}",
            f"{worker['resident_bytes'] >> 20} MiB",
        )
        for worker in result["workers"]
    ]
    columns = ("worker", "node", "state", "running", "waiting", "leased", "sessions", "free blocks", "memory")
    print_table("", columns, rows)
    for worker in result["workers"]:
        for complaint in worker["complaints"]:
            out.print(f"[bold]{worker['worker_id']} {escape(complaint)}[/bold]")
