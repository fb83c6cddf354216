"""`rachis scale`, `rachis drain`, `rachis restart`: changes of the pools, followed until they are as asked."""

import asyncio
from collections.abc import AsyncIterable, Sequence

from rachis.v1 import admin_pb2 as admin
from rachis.v1 import worker_pb2 as wire

from cluster_core.errors import ConfigError, NotFoundError
from command_line.output import out, phases, print_json
from control_plane.client import RachisClient
from control_plane.pools.life import MOST_WORKERS

_POOLS = ("prefill", "decode")
_Response = admin.ScalePoolsResponse | admin.RemoveWorkerResponse | admin.RestartWorkersResponse


def parse_sizes(given: Sequence[str]) -> admin.ScalePoolsRequest:
    """`prefill=3 decode=2`. Raises ConfigError."""
    sizes: dict[str, int] = {}
    for assignment in given:
        pool, _, size = assignment.partition("=")
        if pool not in _POOLS or not size.isdecimal() or int(size) > MOST_WORKERS:
            raise ConfigError(
                f"must be prefill=N or decode=N with at most {MOST_WORKERS} workers, got `{assignment}`", field="scale"
            )
        if pool in sizes:
            raise ConfigError(f"{pool} is given twice", field="scale")
        sizes[pool] = int(size)
    return admin.ScalePoolsRequest(prefill_workers=sizes.get("prefill"), decode_workers=sizes.get("decode"))


async def scale(address: str, request: admin.ScalePoolsRequest, *, as_json: bool) -> None:
    async with RachisClient(address) as client:
        await _follow(client, client.admin.ScalePools(request), as_json=as_json)


async def remove(address: str, worker_id: str | None, node: str | None, *, force: bool, as_json: bool) -> None:
    """One worker, or all of a node at once."""
    async with RachisClient(address) as client:
        names = await _named(client, worker_id, node)
        requests = [admin.RemoveWorkerRequest(worker_id=name, force=force) for name in names]
        await _follow(client, *map(client.admin.RemoveWorker, requests), as_json=as_json)


async def restart(address: str, worker_ids: Sequence[str], *, as_json: bool) -> None:
    async with RachisClient(address) as client:
        request = admin.RestartWorkersRequest(worker_ids=worker_ids)
        await _follow(client, client.admin.RestartWorkers(request), as_json=as_json)


async def set_draining(address: str, worker_id: str | None, node: str | None, *, draining: bool, as_json: bool) -> None:
    states: dict[str, str] = {}
    async with RachisClient(address) as client:
        for name in await _named(client, worker_id, node):
            if draining:
                drained = await client.admin.DrainWorker(admin.DrainWorkerRequest(worker_id=name), timeout=10)
                state = drained.state
            else:
                resumed = await client.admin.ResumeWorker(admin.ResumeWorkerRequest(worker_id=name), timeout=10)
                state = resumed.state
            states[name] = wire.WorkerState.Name(state).removeprefix("WORKER_STATE_").lower()
    if as_json:
        print_json({"workers": states})
        return
    for name, told in states.items():
        out.print(f"{name} is {told}")


def phase_name(phase: admin.PoolPhase.ValueType) -> str:
    return admin.PoolPhase.Name(phase).removeprefix("POOL_PHASE_").lower()


async def _named(client: RachisClient, worker_id: str | None, node: str | None) -> list[str]:
    """The worker, or those of the node. Raises NotFoundError for a node without any."""
    if worker_id is not None:
        return [worker_id]
    records = [view.registration for view in await client.workers()]
    found = [record.worker_id for record in records if record.node == node]
    if not found:
        nodes = ", ".join(sorted({record.node for record in records})) or "none"
        raise NotFoundError(f"no worker is on `{node}`; there are workers on: {nodes}", field="--node")
    return found


async def _follow(client: RachisClient, *calls: AsyncIterable[_Response], as_json: bool) -> None:
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
    pools = (await client.admin.GetPools(admin.GetPoolsRequest(), timeout=10)).pools
    sizes = {wire.Pool.Name(pool.pool).removeprefix("POOL_").lower(): pool for pool in pools}
    if as_json:
        counts = {name: {"desired": pool.desired_workers, "ready": pool.ready_workers} for name, pool in sizes.items()}
        print_json({"workers": last, "pools": counts})
        return
    for worker_id, phase in last.items():
        out.print(f"{worker_id} {'has left' if phase == 'left' else f'is {phase}'}")
    out.print(
        ", ".join(f"{name}: {pool.ready_workers} of {pool.desired_workers} ready" for name, pool in sizes.items())
    )
