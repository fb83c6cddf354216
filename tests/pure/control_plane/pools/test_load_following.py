"""What pools that follow their load go by, and when they do not."""

from typing import Any, cast
from unittest import mock

import pytest
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import worker_pb2 as wire

from cluster_configs.schema import RachisConfig
from control_plane.fleet.membership import Membership
from control_plane.metrics.recent_ttft import RecentTtft
from control_plane.model.worker_snapshot import Pool
from control_plane.pools.autoscaling import PoolSample
from control_plane.pools.life import Pools
from control_plane.pools.load_following import PoolFollowing
from control_plane.pools.pool_sections import POOL_NAMES
from control_plane.pools.timing import POOL_TIMING

PREFILL, DECODE, READY = wire.POOL_PREFILL, wire.POOL_DECODE, admin.POOL_PHASE_READY
AUTOSCALE = {"enabled": True, "min_workers": 1, "max_workers": 8}


class FollowedPools:
    """A pool that grows and shrinks at once, and its registrations. Times are whole seconds."""

    def __init__(self, workers: int, pool: Pool = DECODE) -> None:
        self.pool = pool
        self.size = workers
        self.ttft = RecentTtft()
        self.now_s = 0.0
        self.is_connected = True
        self.queued = 0
        self.membership = Membership()
        self.phases: dict[str, admin.PoolPhase.ValueType] = {}
        config = RachisConfig.model_validate(
            {"pools": {POOL_NAMES[pool]: {"workers": workers, "autoscale": AUTOSCALE}}}
        )
        self.following = PoolFollowing(
            config,
            cast(Pools, self),
            self.membership,
            self.ttft,
            lambda: self.queued,
            POOL_TIMING,
            lambda: self.now_s,
            lambda: self.is_connected,
        )

    def status(self) -> list[admin.PoolStatus]:
        names = [f"{POOL_NAMES[self.pool]}-{number}" for number in range(self.size)]
        workers = [admin.PoolWorker(worker_id=name, phase=self.phases.get(name, READY)) for name in names]
        ready = sum(each.phase == READY for each in workers)
        return [admin.PoolStatus(pool=self.pool, desired_workers=self.size, ready_workers=ready, workers=workers)]

    def resize(self, pool: Any, workers: int) -> None:
        self.size = workers

    def restarting(self) -> bool:
        return False

    def registers(self, running: int, waiting: int = 0) -> None:
        """All workers, each with so many requests of 64."""
        self.membership.replace(
            wire.WorkerRegistration(
                worker_id=f"{POOL_NAMES[self.pool]}-{number}",
                generation=1,
                pool=self.pool,
                state=wire.WORKER_STATE_READY,
                max_running_requests=64,
                load=wire.WorkerLoad(running_requests=running, waiting_requests=waiting),
            )
            for number in range(self.size)
        )

    def looks(self, seconds: int) -> int:
        """The size after so long."""
        for _ in range(seconds):
            self.now_s += 1.0
            self.following.look(self.now_s)
        return self.size


def test_a_pool_shrinks_and_grows_with_what_its_workers_say() -> None:
    pools = FollowedPools(4)
    pools.registers(running=0)
    assert pools.looks(400) == 3
    pools.registers(running=64, waiting=9)
    assert pools.looks(20) == 4


def test_while_the_registry_does_not_answer_a_pool_stays_as_it_is() -> None:
    """The last that was said is of an idle moment, or of a rush."""
    for running, waiting in ((0, 0), (64, 100)):
        pools = FollowedPools(4)
        pools.registers(running, waiting)
        pools.is_connected = False
        assert pools.looks(3600) == 4


def test_when_the_registry_answers_again_all_begins_anew() -> None:
    """299 s of an idle pool, and a moment without the registry."""
    pools = FollowedPools(4)
    pools.registers(running=0)
    for _ in range(3):
        pools.looks(299)
        pools.is_connected = False
        pools.looks(1)
        pools.is_connected = True
    assert pools.size == 4
    # What is used is averaged anew as well, from a pool in full use.
    assert pools.looks(310) == 4
    assert pools.looks(10) == 3


def test_a_worker_that_does_not_come_keeps_its_pool_from_growing_for_as_long_as_a_start_may_take() -> None:
    pools = FollowedPools(2)
    pools.registers(running=64, waiting=99)
    pools.phases["decode-1"] = admin.POOL_PHASE_PENDING
    assert pools.looks(150) == 2
    # It has found room, and does not start.
    pools.phases["decode-1"] = admin.POOL_PHASE_STARTING
    assert pools.looks(151) == 2
    assert pools.looks(20) == 3


def test_a_worker_that_has_been_there_and_starts_again_has_all_its_time() -> None:
    pools = FollowedPools(2)
    pools.registers(running=64, waiting=99)
    for _ in range(3):
        pools.phases["decode-1"] = admin.POOL_PHASE_STARTING
        assert pools.looks(290) == 2
        pools.phases["decode-1"] = READY
        assert pools.looks(1) == 2


@pytest.mark.parametrize("start_s", [5, 60, 120])
def test_a_pool_whose_new_worker_is_enough_does_not_grow_for_what_was_late_before_it_came(start_s: int) -> None:
    """The TTFT of the last half minute is that of the pool without it, for most of that time."""
    pools = FollowedPools(1, PREFILL)
    pools.registers(running=1)

    def plays(seconds: int, ttft_s: float) -> int:
        for _ in range(seconds):
            for _ in range(10):
                pools.ttft.observe(pools.now_s + 0.5, ttft_s)
            pools.looks(1)
        return pools.size

    late_s = 2 * RachisConfig().objectives.ttft_s
    while plays(1, late_s) == 1:
        assert pools.now_s < 60
    pools.phases["prefill-1"] = admin.POOL_PHASE_STARTING
    assert plays(start_s, late_s) == 2
    del pools.phases["prefill-1"]
    assert plays(60, 0.1) == 2
    assert plays(20, late_s) == 3, "what is late after that counts"


def test_what_waits_in_the_router_counts_as_it_says() -> None:
    for queued, size in ((8, 2), (9, 3)):
        pools = FollowedPools(2)
        pools.registers(running=32)
        pools.queued = queued
        assert pools.looks(20) == size


def test_what_a_pool_computes_is_told_apart_from_the_places_in_its_batches() -> None:
    """Long prompts fill workers that do both long before their batches are full."""
    pools = FollowedPools(2)
    samples: list[PoolSample] = []
    # What the autoscaler is given is told to nobody else.
    autoscaler = pools.following._autoscalers[DECODE]
    decide = autoscaler.decide

    def noted(now_s: float, sample: PoolSample) -> int:
        samples.append(sample)
        return decide(now_s, sample)

    # What was sampled is seen nowhere else.
    with mock.patch.object(autoscaler, "decide", noted):
        pools.registers(running=16)
        pools.looks(200)
    assert (round(samples[-1].computing, 3), round(samples[-1].usage, 3)) == (1.0, 0.25)
