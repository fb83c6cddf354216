"""`rachis scale`, `rachis drain`, `rachis restart`: changes of the pools, followed until they are as asked."""

import asyncio
from collections.abc import AsyncIterable, Sequence
from typing import Annotated

import typer
from rachis import AsyncClient
from rachis.v1 import admin_pb2 as admin

from cluster_core.errors import ConfigError, NotFoundError
from command_line import options
from command_line.output import out, phases, print_json
from command_line.router_admin import TIMEOUT_S, phase_name, pool_name
from control_plane.model.limits import MOST_WORKERS
from control_plane.overview.rows import state_name

_POOLS = ("prefill", "decode", "shared")
_Response = admin.ScalePoolsResponse | admin.RemoveWorkerResponse | admin.RestartWorkersResponse


def register(app: typer.Typer) -> None:
    app.command("scale")(scale_command)
    app.command("drain")(drain_command)
    app.command("restart")(restart_command)


def scale_command(
    sizes: Annotated[list[str], typer.Argument(help="prefill=N, decode=N, or both; shared=N where workers do both.")],
    address: options.Address = None,
    as_json: options.AsJson = False,
) -> None:
    """Change how many workers a pool has; those that are too many are drained first."""
    asyncio.run(scale(options.admin_address(address), parse_sizes(sizes), as_json=as_json))


def drain_command(
    worker_id: Annotated[str | None, typer.Argument(help="For example decode-0.")] = None,
    node: Annotated[
        str | None, typer.Option("--node", help="All workers of this host instead, as status has it.")
    ] = None,
    stay: Annotated[
        bool, typer.Option("--stay", help="It stays in its pool and takes nothing new, until --resume.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Take it back into rotation.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Also the last worker that decodes.")] = False,
    address: options.Address = None,
    as_json: options.AsJson = False,
) -> None:
    """Have a worker leave: nothing new comes to it, what runs there ends, sessions that wait for input move."""
    where = options.admin_address(address)
    if stay and resume:
        raise ConfigError("cannot go with --resume", field="--stay")
    if (worker_id is None) == (node is None):
        raise ConfigError("name a worker, or a host with --node", field="drain")
    if stay or resume:
        asyncio.run(set_draining(where, worker_id, node, draining=stay, as_json=as_json))
    else:
        asyncio.run(remove(where, worker_id, node, force=force, as_json=as_json))


def restart_command(
    workers: Annotated[list[str] | None, typer.Argument(help="For example decode-0; all where none is named.")] = None,
    rolling: Annotated[bool, typer.Option("--rolling", help="One after the other, each drained first.")] = False,
    address: options.Address = None,
    as_json: options.AsJson = False,
) -> None:
    """Start workers again without losing a request."""
    if not rolling:
        raise ConfigError("is the only way: workers are started again one after the other", field="--rolling")
    asyncio.run(restart(options.admin_address(address), workers or [], as_json=as_json))


def parse_sizes(given: Sequence[str]) -> admin.ScalePoolsRequest:
    """`prefill=3 decode=2`. Raises ConfigError."""
    sizes: dict[str, int] = {}
    for assignment in given:
        pool, _, size = assignment.partition("=")
        if pool not in _POOLS or not size.isdecimal() or int(size) > MOST_WORKERS:
            raise ConfigError(
                f"must be prefill=N, decode=N or shared=N with at most {MOST_WORKERS} workers, got `{assignment}`",
                field="scale",
            )
        if pool in sizes:
            raise ConfigError(f"{pool} is given twice", field="scale")
        sizes[pool] = int(size)
    return admin.ScalePoolsRequest(**{f"{pool}_workers": size for pool, size in sizes.items()})


async def scale(address: str, request: admin.ScalePoolsRequest, *, as_json: bool) -> None:
    async with AsyncClient(address) as client:
        await _follow(client, client.admin.ScalePools(request), as_json=as_json)


async def remove(address: str, worker_id: str | None, node: str | None, *, force: bool, as_json: bool) -> None:
    """One worker, or all of a node at once."""
    async with AsyncClient(address) as client:
        names = await _named(client, worker_id, node)
        requests = [admin.RemoveWorkerRequest(worker_id=name, force=force) for name in names]
        await _follow(client, *map(client.admin.RemoveWorker, requests), as_json=as_json)


async def restart(address: str, worker_ids: Sequence[str], *, as_json: bool) -> None:
    async with AsyncClient(address) as client:
        request = admin.RestartWorkersRequest(worker_ids=worker_ids)
        await _follow(client, client.admin.RestartWorkers(request), as_json=as_json)


async def set_draining(address: str, worker_id: str | None, node: str | None, *, draining: bool, as_json: bool) -> None:
    states: dict[str, str] = {}
    async with AsyncClient(address) as client:
        for name in await _named(client, worker_id, node):
            if draining:
                drained = await client.admin.DrainWorker(admin.DrainWorkerRequest(worker_id=name), timeout=TIMEOUT_S)
                state = drained.state
            else:
                resumed = await client.admin.ResumeWorker(admin.ResumeWorkerRequest(worker_id=name), timeout=TIMEOUT_S)
                state = resumed.state
            states[name] = state_name(state)
    if as_json:
        print_json({"workers": states})
        return
    for name, state_now in states.items():
        out.print(f"{name} is {state_now}")


async def _named(client: AsyncClient, worker_id: str | None, node: str | None) -> list[str]:
    """The worker, or those of the node. Raises NotFoundError for a node without any."""
    if worker_id is not None:
        return [worker_id]
    records = [view.registration for view in await client.workers()]
    found = [record.worker_id for record in records if record.node == node]
    if not found:
        nodes = ", ".join(sorted({record.node for record in records})) or "none"
        raise NotFoundError(f"no worker is on `{node}`; there are workers on: {nodes}", field="--node")
    return found


async def _follow(client: AsyncClient, *calls: AsyncIterable[_Response], as_json: bool) -> None:
    """Shows each worker's phase until all calls have ended, then what the pools have."""
    last: dict[str, str] = {}
    with phases() as display:

        async def show(responses: AsyncIterable[_Response]) -> None:
            async for response in responses:
                event = response.event
                worker, of = event.worker, f" ({event.done} of {event.of})" if event.of > 1 else ""
                last[worker.worker_id] = phase_name(worker.phase)
                detail = f": {worker.detail}" if worker.detail else ""
                display.show(worker.worker_id, f"{last[worker.worker_id]}{detail}{of}")

        outcomes = await asyncio.gather(*map(show, calls), return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    pools = (await client.admin.GetPools(admin.GetPoolsRequest(), timeout=TIMEOUT_S)).pools
    sizes = {pool_name(pool.pool): pool for pool in pools}
    if as_json:
        counts = {name: {"desired": pool.desired_workers, "ready": pool.ready_workers} for name, pool in sizes.items()}
        print_json({"workers": last, "pools": counts})
        return
    for worker_id, phase in last.items():
        out.print(f"{worker_id} {'has left' if phase == 'left' else f'is {phase}'}")
    out.print(
        ", ".join(f"{name}: {pool.ready_workers} of {pool.desired_workers} ready" for name, pool in sizes.items())
    )
