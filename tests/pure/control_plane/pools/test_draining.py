"""Who is asked, and told, while a worker drains."""

from collections.abc import Callable
from typing import Any, cast

import pytest
from rachis.v1 import worker_pb2 as wire

from cluster_configs.schema import LimitsSection
from control_plane.fleet.membership import Membership
from control_plane.fleet.worker_client import WorkerClient, WorkerUnreachableError
from control_plane.pools.draining import Draining
from control_plane.pools.roster import PoolWorker

READY, DRAINING = wire.WORKER_STATE_READY, wire.WORKER_STATE_DRAINING


def record(name: str = "decode-0", generation: int = 5, address: str = "host:1") -> wire.WorkerRegistration:
    return wire.WorkerRegistration(
        worker_id=name, generation=generation, pool=wire.POOL_DECODE, state=READY, address=address
    )


class Answering:
    """Who answers where, as clients see it. after: what happens before each answer, with its number from 1."""

    def __init__(self, *there: wire.WorkerRegistration, after: Callable[[int], None] = lambda number: None) -> None:
        self.there = {each.address: each for each in there}
        self.told: list[str] = []
        self.running = 0
        self._after = after
        self._asked = 0

    async def status(self, address: str, *_: Any) -> wire.GetWorkerStatusResponse:
        self._asked += 1
        self._after(self._asked)
        if address not in self.there:
            raise WorkerUnreachableError("failed to connect")
        load = wire.WorkerLoad(running_requests=self.running)
        return wire.GetWorkerStatusResponse(registration=self.there[address], load=load)

    async def set_draining(self, address: str, *_: Any, **__: Any) -> None:
        self.told.append(self.there[address].worker_id)
        self.there[address].state = DRAINING


async def drained(worker: PoolWorker, membership: Membership, client: Answering) -> None:
    limits = LimitsSection(drain_timeout_s=60.0)
    clock = iter(range(100))
    draining = Draining(limits, membership, cast(WorkerClient, client), 0.0, lambda: next(clock))
    await draining.until_idle(worker)


def seen(*records: wire.WorkerRegistration) -> Membership:
    membership = Membership()
    membership.replace(records)
    return membership


def lapsed(*, past_generation: int = 0) -> PoolWorker:
    """One that the registry had at host:1."""
    worker = PoolWorker("decode-0", wire.POOL_DECODE, past_generation=past_generation)
    worker.seen_generation, worker.address = 5, "host:1"
    return worker


@pytest.mark.parametrize("other", [record("decode-7", 5), record("decode-0", 6)])
async def test_whoever_has_the_port_of_one_that_died_is_not_told_to_drain(other: wire.WorkerRegistration) -> None:
    """The registry still has the dead one, until its lease ends."""
    membership = seen(record())

    def lease_ends(number: int) -> None:
        if number == 3:
            membership.replace([])

    client = Answering(other, after=lease_ends)
    await drained(PoolWorker("decode-0", wire.POOL_DECODE), membership, client)
    assert (client.told, other.state) == ([], READY)


async def test_one_whose_registration_has_ended_is_drained_where_it_was() -> None:
    def goes_idle(number: int) -> None:
        client.running = int(number < 4)

    client = Answering(record(), after=goes_idle)
    worker = lapsed()
    await drained(worker, seen(), client)
    assert (client.told, client.running, worker.detail) == (
        ["decode-0"],
        0,
        "1 requests run, 0 hand-offs wait for their pull",
    )


@pytest.mark.parametrize("there", [[], [record("decode-7")]])
async def test_one_without_a_registration_that_does_not_answer_is_gone(there: list[wire.WorkerRegistration]) -> None:
    client = Answering(*there)
    await drained(lapsed(), seen(), client)
    assert client.told == []


async def test_one_that_has_ended_or_was_never_there_is_not_asked() -> None:
    def refuse(_: int) -> None:
        raise AssertionError("nobody is to be asked")

    for worker in (lapsed(past_generation=5), PoolWorker("decode-0", wire.POOL_DECODE)):
        await drained(worker, seen(), Answering(record(), after=refuse))
