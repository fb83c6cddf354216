"""What whoever asked for a change of the pools is told while it goes on."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence

from rachis.v1 import admin_pb2 as admin

from control_plane.pools.roster import PoolWorker


async def followed(
    workers: Sequence[PoolWorker],
    work: Iterable["asyncio.Task[None]"],
    look_every_s: float,
    *,
    done: int = 0,
    of: int = 0,
) -> AsyncGenerator[admin.PoolEvent, None]:
    """What changes in the workers while the work is done on them, and at its end. Raises what the work raised."""
    under_way, ended = set(work), done
    of = of or len(workers)
    told: dict[str, admin.PoolWorker] = {}
    while True:
        finished = {task for task in under_way if task.done()}
        ended += len(finished)
        under_way -= finished
        for worker in workers:
            now = worker.to_wire()
            if told.get(worker.worker_id) != now or (finished and not under_way):
                told[worker.worker_id] = now
                yield admin.PoolEvent(worker=now, done=ended, of=of)
        for task in finished:
            task.result()
        if not under_way:
            return
        await asyncio.wait(under_way, timeout=look_every_s, return_when=asyncio.FIRST_COMPLETED)
