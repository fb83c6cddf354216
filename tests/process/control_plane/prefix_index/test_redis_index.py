"""What the router's index makes of the workers' streams: who comes, leaves, starts again or writes what cannot be."""

import asyncio
from typing import Any, cast

import numpy as np
import pytest

from cluster_configs.schema import IndexSection
from cluster_wire.redis_client import RedisClient
from control_plane.fleet.membership import Membership
from control_plane.prefix_index.claim_following import OVERRULED_S
from control_plane.prefix_index.index import PrefixIndex
from control_plane.prefix_index.redis_index import IndexFollower
from kv_transfer.claims.claims import ClaimBatch, ClaimChange, ClaimSnapshot, encode_batch, encode_snapshot
from tests import simulated_time
from tests.fakes.claim_streams import SERVICE, MemoryStreams, as_keys
from tests.fakes.cluster import until
from tests.process.control_plane.prefix_index.claims_world import KEYS
from tests.process.control_plane.prefix_index.followed_index import CountedPause, Followed, cancelled


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


def test_an_index_of_which_nothing_is_told_is_looked_at_before_it_would_be_too_old() -> None:
    """However long the pause between two polls may be by itself: ten seconds here."""

    async def oldest_s() -> float:
        loop = asyncio.get_running_loop()
        section = IndexSection(refresh_s=1.0, max_staleness_s=8.0)
        client = cast(RedisClient, MemoryStreams().client())
        follower = IndexFollower(client, SERVICE, Membership(), PrefixIndex(64, 600.0), section, now_s=loop.time)
        task = asyncio.create_task(follower.follow())
        ages = []
        for _ in range(600):
            await asyncio.sleep(0.25)
            ages.append(follower.health().staleness_s)
        await cancelled(task)
        return max(ages)

    assert 1.0 < simulated_time.run(oldest_s()) <= 2.0


async def test_a_batch_and_a_registration_that_is_ahead_of_the_index_end_a_long_pause(followed: Followed) -> None:
    writing = followed.worker("prefill-0")
    writing.change(0, KEYS)
    writing.write()
    await followed.follower.poll()
    ahead = followed.follower.pause = CountedPause(1.0, 1.0)
    await followed.follower.poll()
    assert ahead.times == 0, "nothing new has come"
    writing.change(0, KEYS[:1])
    writing.write()
    await followed.follower.poll()
    assert ahead.times == 1, "a batch has"
    ahead.times = 0
    followed.follower.membership_changed()
    assert ahead.times == 0
    followed.register("prefill-0", claims_sequence=99)
    followed.follower.membership_changed()
    assert ahead.times == 1
