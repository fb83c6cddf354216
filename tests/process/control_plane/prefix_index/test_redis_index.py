"""From the workers' streams into the index: whatever happens to streams, workers and routers, it ends in the truth."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from rachis.redis_client import RedisClient, connect
from rachis.v1 import worker_pb2 as wire
from redis.cluster import RedisCluster

from cluster_configs.schema import IndexSection
from cluster_core.clock import monotonic_s
from cluster_core.engine_reports import PrefixClaimChange
from control_plane.fleet.membership import Membership
from control_plane.prefix_index.claim_following import (
    GRACE_S,
    OVERRULED_S,
    Apply,
    Instruction,
    Mode,
    Replace,
    WorkerFeed,
)
from control_plane.prefix_index.index import PrefixIndex
from control_plane.prefix_index.redis_index import MOST_ENTRIES_A_POLL, IndexFollower
from kv_transfer.claims.claims import ClaimBatch, ClaimChange, ClaimSnapshot, encode_batch, encode_snapshot
from tests.fakes.claim_streams import (
    SERVICE,
    ClaimStreams,
    MemoryStreams,
    Unreliable,
    WritingWorker,
    as_keys,
)
from tests.fakes.cluster import until
from tests.fakes.redis_server import running_redis
from tests.state_machines import expect_noticed
from worker_runtime.claim_feed import ClaimFeed

WORKERS = ("decode-0", "decode-1", "prefill-0")
_loop = asyncio.new_event_loop()

workers = st.sampled_from(WORKERS)
# Keys are hashes: the index finds their places by that.
KEYS = [each * 0x9E3779B97F4A7C15 % 2**64 for each in range(1, 25)]
few_keys = st.sets(st.sampled_from(KEYS), min_size=1, max_size=6)
tiers = st.integers(0, 1)


class World(RuleBasedStateMachine):
    """Workers that change, write, die and come back, and a router that follows them; `settle` must end in the truth."""

    feed: ClassVar[type[WorkerFeed]] = WorkerFeed

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 100.0
        self.store = self.new_store()
        self.alive: dict[str, WritingWorker] = {}
        self.ghosts: list[WritingWorker] = []
        self.membership = Membership()
        self.registered: dict[str, wire.WorkerRegistration] = {}
        self.generation = 1_000
        self.start_router()

    def new_store(self) -> ClaimStreams:
        return MemoryStreams()

    def new_client(self) -> Any:
        assert isinstance(self.store, MemoryStreams)
        return self.store.client()

    def start_router(self) -> None:
        self.index = PrefixIndex(4096, half_life_s=600.0)
        self.client = Unreliable(self.new_client())
        self.follower = IndexFollower(
            cast(RedisClient, self.client),
            SERVICE,
            self.membership,
            self.index,
            IndexSection(),
            now_s=lambda: self.now_s,
            make_feed=self.feed,
        )

    @initialize()
    def workers_start(self) -> None:
        for worker_id in WORKERS:
            self.start(worker_id, is_registered=True)

    @rule(worker_id=workers, is_registered=st.booleans())
    def start(self, worker_id: str, is_registered: bool) -> None:
        """Takes the next generation; the one before may still be there, and is a ghost from now on."""
        if worker_id in self.alive:
            self.ghosts.append(self.alive[worker_id])
        self.generation += 1
        self.alive[worker_id] = WritingWorker(self.store, worker_id, self.generation)
        if is_registered:
            self.register(worker_id)

    @rule(worker_id=workers)
    def die(self, worker_id: str) -> None:
        """Its registration ends with its lease, at once here."""
        self.alive.pop(worker_id, None)
        self.registered.pop(worker_id, None)
        self.follow_registry()

    @rule(worker_id=workers)
    def register(self, worker_id: str) -> None:
        if worker_id in self.alive:
            worker = self.alive[worker_id]
            self.registered[worker_id] = wire.WorkerRegistration(
                worker_id=worker_id, generation=worker.generation, claims_sequence=worker.sequence
            )
        self.follow_registry()

    @rule(worker_id=workers)
    def registration_is_late(self, worker_id: str) -> None:
        self.registered.pop(worker_id, None)
        self.follow_registry()

    @rule(worker_id=workers, tier=tiers, keys=few_keys)
    def change(self, worker_id: str, tier: int, keys: set[int]) -> None:
        if worker_id in self.alive:
            self.alive[worker_id].change(tier, keys)

    @rule(worker_id=workers, tier=tiers, keys=few_keys, answer_is_lost=st.booleans())
    def change_and_write(self, worker_id: str, tier: int, keys: set[int], answer_is_lost: bool) -> None:
        if worker_id in self.alive:
            self.alive[worker_id].change(tier, keys)
            self.alive[worker_id].write(answer_is_lost=answer_is_lost)

    @rule(worker_id=workers, seed=st.integers(0, 99), batches=st.integers(2, 80))
    def write_many(self, worker_id: str, seed: int, batches: int) -> None:
        chosen = random.Random(seed)
        for _ in range(batches if worker_id in self.alive else 0):
            self.change_and_write(worker_id, chosen.randrange(2), {chosen.choice(KEYS)}, answer_is_lost=False)

    @rule(worker_id=workers)
    def write_snapshot(self, worker_id: str) -> None:
        if worker_id in self.alive:
            self.alive[worker_id].write_snapshot()

    @rule(worker_id=workers)
    def look(self, worker_id: str) -> None:
        if worker_id in self.alive:
            self.alive[worker_id].look()

    @rule(tier=tiers, keys=few_keys)
    def ghosts_go_on(self, tier: int, keys: set[int]) -> None:
        """A worker that does not know that another one goes by its id: it writes and registers."""
        for ghost in self.ghosts:
            ghost.change(tier, keys)
            ghost.write()
            ghost.look()

    @rule(worker_id=workers)
    def ghost_registers(self, worker_id: str) -> None:
        for ghost in self.ghosts:
            if ghost.worker_id == worker_id and worker_id in self.registered:
                self.registered[worker_id] = wire.WorkerRegistration(
                    worker_id=worker_id, generation=ghost.generation, claims_sequence=ghost.sequence
                )
        self.follow_registry()

    @rule()
    def flush(self) -> None:
        self.store.flush()

    @rule(worker_id=workers, chosen=st.integers(0, 99), damage=st.booleans())
    def lose_an_entry(self, worker_id: str, chosen: int, damage: bool) -> None:
        self.store.drop(worker_id, chosen, damage=damage)

    @rule(worker_id=workers, damage=st.booleans())
    def lose_the_snapshot(self, worker_id: str, damage: bool) -> None:
        self.store.drop_snapshot(worker_id, damage=damage)

    @rule()
    def replica_falls_behind(self) -> None:
        self.store.fork()

    @rule()
    def fail_over(self) -> None:
        self.store.fail_over()

    @rule()
    def restart_router(self) -> None:
        _loop.run_until_complete(self.follower.close())
        self.start_router()

    @rule(seconds=st.floats(0.0, 2 * GRACE_S))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @rule()
    def poll(self) -> None:
        _loop.run_until_complete(self.follower.poll())

    @rule(seed=st.integers(0, 999))
    def poll_in_disorder(self, seed: int) -> None:
        self.client.scramble = random.Random(seed)
        self.poll()
        self.client.scramble = None

    @rule()
    def poll_in_vain(self) -> None:
        self.client.is_down = True
        with suppress(redis.ConnectionError):
            self.poll()
        self.client.is_down = False

    @rule()
    def settle(self) -> None:
        """Everybody does what they do when left alone, and then the index is the truth."""
        for _ in range(5):
            for worker_id, worker in self.alive.items():
                worker.write()
                worker.look()
                self.register(worker_id)
            self.poll()
            self.now_s += GRACE_S
        self.index_is_the_truth(self.alive)
        health = self.follower.health()
        assert not health.workers_out_of_sync
        assert not any(worker.lag_batches for worker in health.workers)

    @invariant()
    def what_is_in_sync_is_true(self) -> None:
        health = {worker.worker_id: worker for worker in self.follower.health().workers}
        caught_up = {}
        for worker_id, worker in self.alive.items():
            record = self.registered.get(worker_id)
            if worker_id not in health or record is None or not worker.has_written_all:
                continue
            is_current = (record.generation, record.claims_sequence) == (worker.generation, worker.sequence)
            view = health[worker_id]
            if is_current and view.in_sync and not view.lag_batches:
                caught_up[worker_id] = worker
        self.index_is_the_truth(caught_up)

    @invariant()
    def parts_agree(self) -> None:
        self.follower.check_invariants()
        self.index.check_invariants()

    def index_is_the_truth(self, of: dict[str, WritingWorker]) -> None:
        for worker_id, worker in of.items():
            told = tuple(set(keys.tolist()) for keys in self.index.claims(worker_id))
            assert told == worker.claims, f"{worker_id}: {told} instead of {worker.claims}"

    def follow_registry(self) -> None:
        self.membership.replace(self.registered.values(), self.now_s)
        self.follower.membership_changed()

    def teardown(self) -> None:
        try:
            self.settle()
        finally:
            _loop.run_until_complete(self.follower.close())


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


class Followed:
    """A follower of workers in memory, on a clock of its own."""

    def __init__(self, index: PrefixIndex | None = None) -> None:
        self.now_s = 100.0
        self.store = MemoryStreams()
        self.client = Unreliable(self.store.client())
        self.membership = Membership()
        self.index = index or PrefixIndex(1 << 20, half_life_s=600.0)
        self.follower = IndexFollower(
            cast(RedisClient, self.client),
            SERVICE,
            self.membership,
            self.index,
            IndexSection(refresh_s=0.001),
            is_fit=lambda block_tokens: block_tokens == 16,
            now_s=lambda: self.now_s,
        )
        self.records: dict[str, wire.WorkerRegistration] = {}

    def worker(self, worker_id: str, generation: int = 7) -> WritingWorker:
        self.register(worker_id, generation)
        return WritingWorker(self.store, worker_id, generation)

    def register(self, worker_id: str, generation: int = 7, **counts: int) -> None:
        record = wire.WorkerRegistration(worker_id=worker_id, generation=generation, **counts)  # type: ignore[arg-type]
        self.records[worker_id] = record
        self.membership.replace(self.records.values(), self.now_s)

    def leave(self, worker_id: str) -> None:
        del self.records[worker_id]
        self.membership.replace(self.records.values(), self.now_s)

    def device(self, worker_id: str) -> set[int]:
        return set(self.index.claims(worker_id)[0].tolist())

    @asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.follower.follow())
        try:
            yield
        finally:
            await _cancelled(task)


@pytest.fixture
def followed() -> Followed:
    return Followed()


async def test_a_worker_whose_lease_has_ended_leaves_without_a_poll(followed: Followed) -> None:
    worker = followed.worker("decode-0")
    worker.change(0, KEYS)
    worker.write()
    await followed.follower.poll()
    assert followed.index.lookup(as_keys(KEYS)).device.tolist() == [len(KEYS)]

    followed.leave("decode-0")
    followed.follower.membership_changed()

    assert not followed.index.lookup(as_keys(KEYS)).device.any()
    assert followed.index.workers == []


async def test_a_new_generation_voids_the_claims_of_the_old_one_without_a_poll(followed: Followed) -> None:
    worker = followed.worker("decode-0")
    worker.change(0, KEYS)
    worker.write()
    await followed.follower.poll()

    followed.register("decode-0", generation=8)
    followed.follower.membership_changed()

    assert followed.device("decode-0") == set()
    assert followed.index.generation("decode-0") == 8


async def test_an_outage_leaves_the_index_as_it_is_and_is_measured(
    followed: Followed, caplog: pytest.LogCaptureFixture
) -> None:
    worker = followed.worker("decode-0")
    worker.change(0, KEYS[:5])
    worker.write()
    async with followed.following():
        await until(lambda: len(followed.device("decode-0")) == 5)
        followed.client.is_down = True
        await until(lambda: not followed.follower.connected)
        followed.now_s += 9.0
        assert not followed.follower.is_stale()
        followed.now_s += 2.0
        health = followed.follower.health()
        assert health.stale
        assert health.staleness_s == pytest.approx(11.0)
        assert followed.device("decode-0") == set(KEYS[:5])
        assert caplog.text.count("does not answer") == 1

        worker.change(0, KEYS[5:])
        worker.write()
        followed.client.is_down = False

        await until(lambda: followed.device("decode-0") == set(KEYS))
        await until(lambda: followed.follower.connected)
        assert not followed.follower.is_stale()


async def test_a_redis_that_comes_back_empty_is_followed_again(followed: Followed) -> None:
    worker = followed.worker("decode-0")
    worker.change(0, KEYS[:5])
    worker.write()
    await followed.follower.poll()
    followed.store.flush()
    await followed.follower.poll()
    assert followed.device("decode-0") == set(KEYS[:5])

    worker.change(0, KEYS[4:7])
    worker.write()
    worker.change(1, KEYS[:2])
    worker.write()
    await followed.follower.poll()

    assert followed.device("decode-0") == worker.claims[0]
    assert followed.follower.health().counts.resyncs == 1


async def test_a_router_that_starts_without_a_snapshot_asks_for_one(followed: Followed) -> None:
    worker = followed.worker("decode-0")
    worker.change(0, KEYS)
    worker.write()
    followed.store.flush()
    followed.register("decode-0", claims_sequence=worker.sequence)
    await followed.follower.poll()
    assert followed.follower.health().workers_out_of_sync == ("decode-0",)
    assert followed.store.wants_resync("decode-0")

    worker.look()
    await followed.follower.poll()

    assert followed.device("decode-0") == set(KEYS)
    assert followed.follower.health().workers_out_of_sync == ()


async def test_a_worker_that_finishes_requests_without_a_word_raises_an_alarm(followed: Followed) -> None:
    followed.worker("decode-0")
    followed.worker("decode-1")
    for requests in range(1, 5):
        followed.register("decode-0", cacheable_requests=requests, stored_blocks=2)
        followed.register("decode-1", cacheable_requests=requests, stored_blocks=2 * requests)
        await followed.follower.poll()
        followed.now_s += 1.0
    assert followed.follower.health().silent_workers == ()

    followed.now_s += 60.0

    assert followed.follower.health().silent_workers == ("decode-0",)


async def test_one_worker_whose_stream_cannot_be_read_does_not_stop_the_others(followed: Followed) -> None:
    broken, sound = followed.worker("decode-0"), followed.worker("decode-1")
    for worker in (broken, sound):
        worker.change(0, KEYS)
        worker.write()
    followed.client.broken["decode-0"] = redis.ResponseError("WRONGTYPE")

    await followed.follower.poll()

    assert followed.device("decode-1") == set(KEYS)
    health = followed.follower.health()
    assert health.workers_out_of_sync == ("decode-0",)
    assert health.counts.damaged >= 1


async def test_the_index_ages_while_a_stream_cannot_be_read(followed: Followed) -> None:
    followed.worker("decode-0")
    followed.client.broken["decode-0"] = redis.ResponseError("WRONGTYPE")
    followed.now_s += 11.0
    await followed.follower.poll()
    assert followed.follower.is_stale()

    followed.client.broken.clear()
    await followed.follower.poll()

    assert not followed.follower.is_stale()


async def test_the_index_ages_while_more_is_written_than_read(
    followed: Followed,
) -> None:
    worker = followed.worker("decode-0")
    for number in range(2 * MOST_ENTRIES_A_POLL + 10):
        worker.change(0, [KEYS[number % 20]])
        worker.write()
    followed.now_s += 11.0
    await followed.follower.poll()
    assert followed.follower.is_stale()

    for _ in range(3):
        await followed.follower.poll()

    assert not followed.follower.is_stale()
    assert followed.device("decode-0") == worker.claims[0] != set()


async def test_a_worker_that_starts_again_with_a_lower_generation_is_followed(followed: Followed) -> None:
    """Redis has lost its data, and its clock is behind."""
    older = followed.worker("decode-0", generation=9)
    older.change(0, KEYS[:5])
    older.write()
    await followed.follower.poll()
    followed.store.flush()
    worker = followed.worker("decode-0", generation=8)
    worker.change(0, KEYS[5:])
    worker.write()
    followed.register("decode-0", generation=8, claims_sequence=worker.sequence)
    await followed.follower.poll()
    assert followed.index.generation("decode-0") == 9

    followed.now_s += OVERRULED_S
    await followed.follower.poll()

    assert followed.index.generation("decode-0") == 8
    assert followed.device("decode-0") == set(KEYS[5:])
    assert followed.follower.health().workers_out_of_sync == ()
    followed.follower.check_invariants()


async def test_an_error_of_the_client_leaves_the_index_as_it_is(followed: Followed) -> None:
    worker = followed.worker("decode-0")
    worker.change(0, KEYS)
    worker.write()
    await followed.follower.poll()

    followed.client.failure = redis.exceptions.RedisClusterException("no node can be reached")
    async with followed.following():
        await until(lambda: not followed.follower.connected)

        assert followed.device("decode-0") == set(KEYS)


async def test_a_worker_whose_chunks_are_others_is_complained_of_once(
    followed: Followed, caplog: pytest.LogCaptureFixture
) -> None:
    followed.register("decode-0", block_size_tokens=16)
    followed.register("decode-1", block_size_tokens=48)
    followed.register("decode-2")
    for _ in range(3):
        await followed.follower.poll()

    assert caplog.text.count("blocks of") == 1
    assert "decode-1 has blocks of 48 tokens" in caplog.text


async def test_a_redis_that_answers_that_it_cannot_answer_is_away(followed: Followed) -> None:
    followed.worker("decode-0")
    followed.client.broken["decode-0"] = redis.exceptions.ClusterDownError("CLUSTERDOWN")
    followed.now_s += 11.0

    with pytest.raises(redis.exceptions.ClusterDownError):
        await followed.follower.poll()

    assert followed.follower.health().stale
    assert followed.follower.health().counts.damaged == 0


async def test_an_entry_that_is_not_what_its_name_says_is_damaged(followed: Followed) -> None:
    followed.worker("decode-0")
    change = ClaimChange(device_stored=as_keys(KEYS))
    followed.store.append("decode-0", (7, 1), encode_batch(ClaimBatch(6, 1, change)))

    await followed.follower.poll()

    assert followed.device("decode-0") == set()
    assert followed.follower.health().workers_out_of_sync == ("decode-0",)
    assert followed.store.wants_resync("decode-0")


async def test_whatever_goes_wrong_inside_is_repaired_from_snapshots(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failures = iter([RuntimeError("half done")])

    class FailsOnce(PrefixIndex):
        def apply(self, worker_id: str, change: ClaimChange) -> None:
            super().apply(worker_id, change)
            for failure in failures:
                raise failure

    followed = Followed(FailsOnce(1 << 20, half_life_s=600.0))
    worker = followed.worker("decode-0")
    worker.write_snapshot()
    worker.change(0, KEYS)
    worker.write()
    async with followed.following():
        await until(lambda: "half done" in caplog.text and followed.device("decode-0") == set(KEYS))


async def test_a_large_snapshot_leaves_the_event_loop_to_others(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def at_once(function: Any, *arguments: Any) -> Any:
        return function(*arguments)

    # Reading the snapshot on a thread would give the others their turns, whatever is done after it.
    monkeypatch.setattr(asyncio, "to_thread", at_once)
    followed.worker("decode-0")
    many = np.random.default_rng(1).integers(1, 2**64, 200_000, dtype=np.uint64)
    data = encode_snapshot(ClaimSnapshot(7, 5, many, as_keys(())))
    followed.store.put_snapshot("decode-0", (7, 5), data, (7, 6))
    followed.register("decode-0", claims_sequence=5)
    turns = 0

    async def take_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    others = asyncio.create_task(take_turns())
    await asyncio.sleep(0)
    before = turns
    await followed.follower.poll()
    others.cancel()

    assert len(followed.index.claims("decode-0")[0]) > 199_000
    assert turns - before >= 30


async def test_a_worker_that_leaves_while_its_claims_are_taken_in_has_none() -> None:
    class ThenRestarts(PrefixIndex):
        def apply(self, worker_id: str, change: ClaimChange) -> None:
            super().apply(worker_id, change)
            world.register("decode-0", generation=8)
            world.follower.membership_changed()

    world = Followed(ThenRestarts(1 << 20, half_life_s=600.0))
    worker = world.worker("decode-0")
    worker.change(0, np.random.default_rng(1).integers(1, 2**63, 5000).tolist())
    worker.write_snapshot()
    world.register("decode-0", claims_sequence=worker.sequence)
    await world.follower.poll()

    assert world.index.generation("decode-0") == 8
    assert world.device("decode-0") == set()


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
            await _cancelled(following)
            await follower.close()
    assert follower.health().counts.batches > 20


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
        record = wire.WorkerRegistration(worker_id="decode-0", generation=generation, claims_sequence=feed.sequence)
        membership.replace([record], monotonic_s())
    await until(lambda: feed.waiting_keys() == 0 and _told(index) == claims)
    await _cancelled(writing)
    await feed.close()
    await client.aclose()


def _told(index: PrefixIndex) -> tuple[set[int], set[int]]:
    device, host = index.claims("decode-0")
    return set(device.tolist()), set(host.tolist())


async def _cancelled(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
