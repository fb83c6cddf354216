"""Workers that write, die and come back while a router follows their streams: the machine behind the interleavings."""

import asyncio
import random
from contextlib import suppress
from typing import Any, ClassVar, cast

import redis
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from rachis.v1 import worker_pb2 as wire

from cluster_configs.schema import IndexSection
from cluster_wire.redis_client import RedisClient
from control_plane.fleet.membership import Membership
from control_plane.prefix_index.claim_following import GRACE_S, WorkerFeed
from control_plane.prefix_index.index import PrefixIndex
from control_plane.prefix_index.redis_index import IndexFollower
from tests.fakes.claim_streams import SERVICE, ClaimStreams, MemoryStreams, Unreliable, WritingWorker

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
        self.membership.replace(self.registered.values())
        self.follower.membership_changed()

    def teardown(self) -> None:
        try:
            self.settle()
        finally:
            _loop.run_until_complete(self.follower.close())
