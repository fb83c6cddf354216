"""The index while Redis, or a part of it, does not answer: it stays as it is, tells its age, and catches up."""

import pytest
import redis

from control_plane.prefix_index.redis_index import MOST_ENTRIES_A_POLL
from tests.fakes.cluster import until
from tests.process.control_plane.prefix_index.claims_world import KEYS
from tests.process.control_plane.prefix_index.followed_index import Followed


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


async def test_where_a_snapshot_cannot_be_asked_for_the_one_that_is_there_is_not_read_with_every_poll(
    followed: Followed,
) -> None:
    worker = followed.worker("decode-0")
    for key in KEYS[:3]:
        worker.change(0, [key])
        worker.write()
    followed.store.drop("decode-0", 1, damage=False)
    followed.client.refusal = redis.OutOfMemoryError("OOM")
    for _ in range(20):
        await followed.follower.poll()
    assert followed.client.snapshots_read == 1
    assert not followed.store.wants_resync("decode-0")

    followed.client.refusal = None
    followed.now_s += 5.0
    await followed.follower.poll()
    assert followed.store.wants_resync("decode-0")
    worker.look()
    await followed.follower.poll()
    assert followed.device("decode-0") == set(KEYS[:3])


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


async def test_an_error_of_the_client_leaves_the_index_as_it_is(followed: Followed) -> None:
    worker = followed.worker("decode-0")
    worker.change(0, KEYS)
    worker.write()
    await followed.follower.poll()

    followed.client.failure = redis.exceptions.RedisClusterException("no node can be reached")
    async with followed.following():
        await until(lambda: not followed.follower.connected)

        assert followed.device("decode-0") == set(KEYS)


async def test_a_redis_that_answers_that_it_cannot_answer_is_away(followed: Followed) -> None:
    followed.worker("decode-0")
    followed.client.broken["decode-0"] = redis.exceptions.ClusterDownError("CLUSTERDOWN")
    followed.now_s += 11.0

    with pytest.raises(redis.exceptions.ClusterDownError):
        await followed.follower.poll()

    assert followed.follower.health().stale
    assert followed.follower.health().counts.damaged == 0
