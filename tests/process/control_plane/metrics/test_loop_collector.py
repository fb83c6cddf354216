"""What of a scrape the router's loop has to do."""

import asyncio
import threading
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

from rachis.v1 import admin_pb2 as admin
from rachis.v1 import worker_pb2 as wire

from control_plane.metrics.placement_metrics import PlacementCollector
from control_plane.metrics.worker_metrics import WorkerCollector
from control_plane.placement.counts import PlacementCounts

WORKERS = 50


class Watched(list[admin.WorkerView]):
    """Notes on which threads somebody goes through the workers."""

    def __init__(self, views: Iterable[admin.WorkerView]) -> None:
        super().__init__(views)
        self.threads: list[int] = []

    def __iter__(self) -> Iterator[admin.WorkerView]:
        self.threads.append(threading.get_ident())
        return super().__iter__()


async def test_families_of_all_workers_are_made_beside_the_loop() -> None:
    records = (wire.WorkerRegistration(worker_id=f"decode-{number}") for number in range(WORKERS))
    workers = Watched(admin.WorkerView(registration=record, load=wire.WorkerLoad()) for record in records)
    views: Any = SimpleNamespace(gather=AsyncMock(return_value=workers))
    collector = WorkerCollector(views, asyncio.get_running_loop())

    families = await asyncio.to_thread(lambda: list(collector.collect()))

    (usable,) = (family for family in families if family.name == "rachis_worker_usable")
    assert len(usable.samples) == WORKERS
    assert workers.threads and threading.get_ident() not in workers.threads


async def test_what_is_counted_on_the_loop_is_told_as_it_was_seen() -> None:
    """Counts go on while a scrape's thread makes families."""
    counts, none = PlacementCounts(), SimpleNamespace(copies={}, given_up=0)
    placer: Any = SimpleNamespace(counts=counts, prefill_heavy=lambda: 0)
    replicator: Any = SimpleNamespace(plan=none, copies=0, failed=0)
    loop = asyncio.get_running_loop()
    collector = PlacementCollector(admin.GetIndexStatusResponse, placer, replicator, dict, loop)

    seen = await collector.read()
    counts.bound_elsewhere += 1

    (told,) = (family for family in collector.metrics(seen) if family.name == "rachis_placement_bound_elsewhere")
    assert [sample.value for sample in told.samples] == [0]
