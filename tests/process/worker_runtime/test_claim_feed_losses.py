"""The feed of claims on a Redis that loses data or answers, or after a defect of ours: all claims are there again."""

import asyncio
import random
from collections.abc import Callable
from typing import Any, cast

import pytest
import redis.asyncio as redis

from cluster_configs.schema import IndexSection
from cluster_core.engine_reports import PrefixClaimChange, PrefixClaims
from cluster_wire import registry
from cluster_wire.redis_client import RedisClient, connect
from tests.fakes.claims_reader import Read, read_claims
from tests.process.worker_runtime.claim_feed_world import (
    SERVICE,
    WORKER,
    Server,
    device,
    feeding,
    holds,
    on_device,
    reads,
    until,
)
from worker_runtime import claim_feed
from worker_runtime.claim_feed import FeedTiming
from worker_runtime.claim_scripts import WRITE


class LosesAnswers:
    """A client that writes batches and does not hear so, once for each of `first`, which is called in between."""

    def __init__(self, client: Any) -> None:
        self.first: list[Callable[[], None]] = []
        self._client = client

    def register_script(self, script: str) -> Any:
        call = self._client.register_script(script)

        async def called(**arguments: Any) -> Any:
            answer = await call(**arguments)
            if script == WRITE and self.first:
                self.first.pop()()
                raise redis.TimeoutError("no answer")
            return answer

        return called

    async def aclose(self) -> None:
        await self._client.aclose()


async def test_after_flushall_all_claims_are_there_again_with_a_number_of_their_own(
    server: Server, client: redis.Redis
) -> None:
    async with feeding(server) as feed:
        feed.changed(device(1, 2, 3))
        await reads(client, on_device(1, 2, 3))
        await client.flushall()
        read = await reads(client, on_device(1, 2, 3))
        assert read.sequence > 1
        await client.flushall()
        feed.changed(device(4, gone=(1,)))
        await reads(client, on_device(2, 3, 4))
        await until(lambda: holds(lambda: feed.waiting_keys() == 0))
        assert feed.counters.losses == 2


async def test_a_snapshot_that_is_asked_for_is_written(server: Server, client: redis.Redis) -> None:
    async with feeding(server) as feed:
        feed.changed(device(1))
        await reads(client, on_device(1))
        await client.delete(registry.snapshot_key(SERVICE, WORKER))
        await client.set(registry.resync_key(SERVICE, WORKER), b"1", px=10_000)

        await reads(client, on_device(1))
        await until(lambda: _is_gone(client, registry.resync_key(SERVICE, WORKER)))
        feed.changed(device(2))
        await reads(client, on_device(1, 2))


async def _is_gone(client: redis.Redis, key: str) -> bool:
    return not await client.exists(key)


async def test_resync_alone_gives_a_snapshot_of_what_was_written(server: Server, client: redis.Redis) -> None:
    async with feeding(server) as feed:
        feed.changed(device(1))
        await reads(client, on_device(1))
        await client.set(registry.resync_key(SERVICE, WORKER), b"1", px=10_000)
        await until(lambda: _is_gone(client, registry.resync_key(SERVICE, WORKER)))

        assert await reads(client, on_device(1)) == Read(1000, 1, on_device(1), ())
        assert (feed.counters.losses, feed.counters.snapshots) == (0, 1)


async def test_a_stream_that_somebody_trimmed_goes_on(server: Server, client: redis.Redis) -> None:
    async with feeding(server) as feed:
        feed.changed(device(1))
        await reads(client, on_device(1))
        await client.xtrim(registry.claims_key(SERVICE, WORKER), maxlen=0, approximate=False)
        feed.changed(device(2))
        await until(lambda: holds(lambda: feed.sequence == 2))

        # The follower sees a gap and asks for a snapshot.
        with pytest.raises(AssertionError, match="a gap"):
            await read_claims(client, SERVICE, WORKER)
        await client.set(registry.resync_key(SERVICE, WORKER), b"1", px=10_000)
        await until(lambda: _is_gone(client, registry.resync_key(SERVICE, WORKER)))
        await reads(client, on_device(1, 2))


async def test_the_older_of_two_wins_back_nothing_after_flushall(server: Server, client: redis.Redis) -> None:
    """Nobody remembers the newer one then; its next check puts things right."""
    async with feeding(server, 1000) as older, feeding(server, 2000) as newer:
        newer.changed(device(1))
        await reads(client, on_device(1))
        await client.flushall()
        older.changed(device(2))

        assert (await reads(client, on_device(1))).generation == 2000
        await until(lambda: holds(lambda: older.is_superseded))
        assert not newer.is_superseded


async def test_a_defect_is_logged_and_seen_and_everything_written_anew(
    server: Server, client: redis.Redis, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with feeding(server, timing=FeedTiming(retry_s=0.01)) as feed:
        feed.changed(device(1))
        await reads(client, on_device(1))
        await until(lambda: holds(lambda: feed.sequence == 1))
        assert feed.claims_sequence == 1

        def fails(*arguments: object) -> bytes:
            raise ZeroDivisionError("of a test")

        with monkeypatch.context() as defect:
            # A defect of our own code has no port.
            defect.setattr(claim_feed, "encode_batch", fails)
            defect.setattr(claim_feed, "_encoded_snapshot", fails)
            feed.changed(device(2))
            await until(lambda: holds(lambda: feed.claims_sequence == 2))
            await asyncio.sleep(0.05)
            assert feed.sequence == 1
        read = await reads(client, on_device(1, 2))
        await until(lambda: holds(lambda: feed.claims_sequence == read.sequence))
        assert caplog.text.count("for a defect") == 1
    assert feed.claims_sequence == feed.sequence + 1, "it has ended"


async def test_an_answer_that_got_lost_writes_nothing_twice(server: Server, client: redis.Redis) -> None:
    losing = LosesAnswers(connect(server.url, 1.0))
    async with feeding(server, client=cast(RedisClient, losing)) as feed:
        feed.changed(device(1))
        await reads(client, on_device(1))
        # It is read before its answer has come, and that answer is not the one to lose.
        await until(lambda: holds(lambda: feed.sequence == 1))
        losing.first.append(lambda: feed.changed(device(3)))
        feed.changed(device(2))

        assert (await reads(client, on_device(1, 2, 3))).batches == (1, 2, 3)
        assert feed.counters.losses == 0


async def test_any_interleaving_of_changes_and_losses_ends_with_the_truth(server: Server, client: redis.Redis) -> None:
    rng, claims = random.Random(11), (set[int](), set[int]())
    async with feeding(server, index=IndexSection(write_interval_s=0.001, snapshot_keys=20)) as feed:
        for step in range(300):
            tier = rng.randrange(2)
            states = {}
            for _ in range(rng.randrange(6)):
                key = rng.randrange(1, 60)
                states[key] = key not in claims[tier]
                (claims[tier].add if states[key] else claims[tier].discard)(key)
            feed.changed(PrefixClaimChange(states) if not tier else PrefixClaimChange({}, states))
            match rng.randrange(25):
                case 0:
                    await client.flushall()
                case 1:
                    await client.set(registry.resync_key(SERVICE, WORKER), b"1", px=10_000)
                case 2:
                    await client.delete(registry.claims_key(SERVICE, WORKER))
                case 3:
                    await client.delete(registry.snapshot_key(SERVICE, WORKER))
                case _:
                    await asyncio.sleep(0.002 * (step % 3))
        await reads(client, PrefixClaims(frozenset(claims[0]), frozenset(claims[1])))
