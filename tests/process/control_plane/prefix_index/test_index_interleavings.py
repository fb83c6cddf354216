"""The index ends in the truth, whatever happens to streams, workers and routers, and in whatever order."""

import asyncio
import random
from pathlib import Path
from typing import Any, ClassVar

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from rachis.v1 import worker_pb2 as wire
from redis.cluster import RedisCluster

from cluster_configs.schema import IndexSection
from cluster_core.engine_reports import PrefixClaimChange
from cluster_wire.redis_client import connect
from control_plane.fleet.membership import Membership
from control_plane.prefix_index.claim_following import Apply, Instruction, Mode, Replace, WorkerFeed
from control_plane.prefix_index.index import PrefixIndex
from control_plane.prefix_index.redis_index import IndexFollower
from kv_transfer.claims.claims import ClaimBatch, ClaimChange, ClaimSnapshot
from tests.fakes.claim_streams import SERVICE, ClaimStreams
from tests.fakes.cluster import until
from tests.fakes.redis_server import running_redis
from tests.process.control_plane.prefix_index.claims_world import KEYS, World
from tests.process.control_plane.prefix_index.followed_index import cancelled
from tests.state_machines import expect_noticed
from worker_runtime.claim_feed import ClaimFeed

test_any_interleaving_ends_in_the_truth = World.TestCase
test_any_interleaving_ends_in_the_truth.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


class _GapIgnored(WorkerFeed):
    def batch(self, batch: ClaimBatch) -> list[Instruction]:
        if batch.generation == self.generation and batch.sequence > self.sequence:
            self.sequence = batch.sequence - 1
        return super().batch(batch)


class _OldSnapshotTaken(WorkerFeed):
    def _leads_on(self, snapshot: ClaimSnapshot) -> bool:
        return snapshot.generation >= self.generation


class _SnapshotAdded(WorkerFeed):
    def snapshot(self, snapshot: ClaimSnapshot | None) -> list[Instruction]:
        instructions = super().snapshot(snapshot)
        return [
            Apply(ClaimChange(device_stored=each.snapshot.device, host_stored=each.snapshot.host))
            if isinstance(each, Replace)
            else each
            for each in instructions
        ]


class _NeverAsks(WorkerFeed):
    def snapshot(self, snapshot: ClaimSnapshot | None) -> list[Instruction]:
        instructions = super().snapshot(snapshot)
        self.mode = Mode.FOLLOWING
        return instructions


class _RegistrationNotBelieved(WorkerFeed):
    def _check_progress(self, told: int, now_s: float) -> None:
        pass


@pytest.mark.parametrize("bug", [_GapIgnored, _OldSnapshotTaken, _SnapshotAdded, _NeverAsks, _RegistrationNotBelieved])
def test_a_planted_bug_is_noticed(bug: type[WorkerFeed]) -> None:
    expect_noticed(type(f"World{bug.__name__}", (World,), {"feed": bug}))


class _RealWorld(World):
    """The same in a real Redis."""

    url: ClassVar[str]

    def new_store(self) -> ClaimStreams:
        place = self.url.replace("+cluster", "")
        client = RedisCluster.from_url(place) if "+cluster" in self.url else redis.Redis.from_url(place)
        client.flushall()
        return ClaimStreams(client)

    def new_client(self) -> Any:
        return connect(self.url, timeout_s=5.0)


@pytest.mark.integration
@pytest.mark.parametrize("is_cluster", [False, True], ids=["single", "cluster"])
def test_any_interleaving_ends_in_the_truth_in_a_real_redis(tmp_path: Path, is_cluster: bool) -> None:
    short = settings(max_examples=10, stateful_step_count=50, deadline=None, derandomize=True, database=None)
    with running_redis(tmp_path, is_cluster=is_cluster) as url:
        run_state_machine_as_test(type("_RealWorld", (_RealWorld,), {"url": url}), settings=short)


@pytest.mark.integration
@pytest.mark.parametrize("is_cluster", [False, True], ids=["single", "cluster"])
async def test_what_a_worker_writes_is_what_the_router_believes(tmp_path: Path, is_cluster: bool) -> None:
    """The worker's own feed, through losses of Redis's data and a restart of the worker."""
    with running_redis(tmp_path, is_cluster=is_cluster) as url:
        membership = Membership()
        index = PrefixIndex(1 << 16, half_life_s=600.0)
        section = IndexSection(refresh_s=0.01)
        follower = IndexFollower(connect(url, timeout_s=2.0), SERVICE, membership, index, section)
        following = asyncio.create_task(follower.follow())
        try:
            for generation in (7, 8):
                await _worker_lives(url, generation, membership, index)
        finally:
            await cancelled(following)
            await follower.close()
    counts = follower.health().counts
    assert counts.batches > 2
    assert counts.keys > 100


async def _worker_lives(url: str, generation: int, membership: Membership, index: PrefixIndex) -> None:
    """A worker changes its claims sixty times, while Redis loses everything twice, and in the end all are known."""
    chosen = random.Random(generation)
    section = IndexSection(write_interval_s=0.001, snapshot_keys=40)
    feed = ClaimFeed(connect(url, timeout_s=2.0), SERVICE, "decode-0", generation, section)
    client = connect(url, timeout_s=2.0)
    await feed.open()
    writing = asyncio.create_task(feed.keep())
    claims: tuple[set[int], set[int]] = (set(), set())
    for step in range(60):
        states: tuple[dict[int, bool], dict[int, bool]] = ({}, {})
        for tier in (0, 1):
            for key in chosen.sample(KEYS, 3):
                claims[tier].symmetric_difference_update({key})
                states[tier][key] = key in claims[tier]
        feed.changed(PrefixClaimChange(*states))
        if step in (20, 40):
            await client.flushall()
        await asyncio.sleep(0.002)
        _register(membership, feed, generation)

    def is_all_known() -> bool:
        # What was written anew after a loss is announced by the registration alone, until the next change.
        _register(membership, feed, generation)
        return feed.waiting_keys() == 0 and _told(index) == claims

    await until(is_all_known)
    await cancelled(writing)
    await feed.close()
    await client.aclose()


def _register(membership: Membership, feed: ClaimFeed, generation: int) -> None:
    record = wire.WorkerRegistration(worker_id="decode-0", generation=generation, claims_sequence=feed.sequence)
    membership.replace([record])


def _told(index: PrefixIndex) -> tuple[set[int], set[int]]:
    device, host = index.claims("decode-0")
    return set(device.tolist()), set(host.tolist())
