"""The registry and the streams of claims over a real Redis and over the simulation's, asked by the production code."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import redis.asyncio as redis
from rachis.v1 import worker_pb2 as wire

from cluster_configs.schema import IndexSection
from cluster_core.clock import ClusterClock, UnixMs, unix_ms
from cluster_core.engine_reports import PrefixClaimChange
from cluster_core.errors import StartError
from cluster_wire import registry
from cluster_wire.redis_client import REDIS_DOWN, connect
from control_plane.fleet.fencing import Fence
from control_plane.fleet.load_sharing import LoadSharing
from control_plane.fleet.loads import Work
from control_plane.fleet.membership import Membership
from control_plane.fleet.registry_follower import RegistryFollower
from control_plane.placement import replicator
from control_plane.prefix_index import access_log
from control_plane.prefix_index.index import PrefixIndex
from control_plane.prefix_index.redis_index import IndexFollower
from fault_sim.local_redis.client import LocalRedis
from fault_sim.local_redis.store import Store
from fault_sim.network import Network
from tests.fakes.redis_server import running_redis
from worker_runtime.claim_feed import ClaimFeed
from worker_runtime.registration import Registration

SERVICE = "svc-test"
# One that ends, and one that does not while a test goes on.
SHORT_LEASE_S = 0.2
LEASE_S = 60.0

# Makes a client that waits so many seconds.
Connect = Callable[[float], Any]
_PATIENCE_S = 60.0


@pytest.fixture(params=["local", pytest.param("Redis", marks=pytest.mark.integration)])
async def connected(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Connect]:
    if request.param == "Redis":
        with running_redis(tmp_path) as url:
            # A busy machine is late; what happens then is asked of the other one.
            yield lambda timeout_s: connect(url, max(timeout_s, _PATIENCE_S))
        return
    store, network = Store(), Network(Random(0))
    yield lambda timeout_s: LocalRedis(store, network, "test", timeout_s)


@asynccontextmanager
async def registered(
    connected: Connect, name: str = "decode-0", clock: ClusterClock | None = None, lease_s: float = LEASE_S
) -> AsyncIterator[Registration]:
    record = wire.WorkerRegistration(worker_id=name, pool=wire.POOL_DECODE, state=wire.WORKER_STATE_READY)
    registration = Registration(connected(lease_s), SERVICE, record, lease_s, clock=clock)
    try:
        yield registration
    finally:
        await registration.close()


@asynccontextmanager
async def fed(connected: Connect, generation: int, name: str = "decode-0") -> AsyncIterator[ClaimFeed]:
    feed = ClaimFeed(connected(2), SERVICE, name, generation, IndexSection())
    try:
        yield feed
    finally:
        await feed.close()


@asynccontextmanager
async def client(connected: Connect) -> AsyncIterator[Any]:
    made = connected(2)
    try:
        yield made
    finally:
        await made.aclose()


async def read(connected: Connect) -> dict[str, int]:
    """Generations by worker, as a router reads them."""
    follower = RegistryFollower(connected(2), SERVICE, Membership(), refresh_s=1, worker_lease_s=LEASE_S)
    try:
        return {record.worker_id: record.generation for record in await follower.read()}
    finally:
        await follower.close()


async def test_generations_grow_and_are_never_below_the_time(connected: Connect) -> None:
    async with registered(connected) as first, registered(connected, "decode-1") as second:
        one, other = await first.open(), await second.open()

    assert one < other
    assert one > 1_600_000_000_000


async def test_a_registration_is_read_until_its_lease_ends(connected: Connect) -> None:
    async with registered(connected, lease_s=SHORT_LEASE_S) as registration:
        generation = await registration.open()
        await registration.publish()
        # A busy machine reads it when it has ended already.
        assert await read(connected) in ({"decode-0": generation}, {})

        await asyncio.sleep(2 * SHORT_LEASE_S)

        assert await read(connected) == {}


async def test_a_worker_learns_the_time_from_redis_and_tells_how_far_its_host_is_ahead(connected: Connect) -> None:
    clock = ClusterClock(lambda: UnixMs(unix_ms() + 600_000))
    async with registered(connected, clock=clock) as registration:
        await registration.open()
        assert clock.unix_ms() == pytest.approx(unix_ms(), abs=500)
        await registration.publish()

        assert registration.record.clock_ahead_ms == pytest.approx(600_000, abs=500)


async def test_a_registration_that_is_closed_is_gone_at_once(connected: Connect) -> None:
    async with registered(connected) as registration:
        await registration.open()
        await registration.publish()

    assert await read(connected) == {}


async def test_an_older_generation_does_not_write_over_a_newer_one(connected: Connect) -> None:
    async with registered(connected) as old, registered(connected) as new:
        await old.open()
        generation = await new.open()
        await new.publish()
        await old.publish()

        assert await read(connected) == {"decode-0": generation}


async def test_a_worker_that_is_kept_out_does_not_register_until_its_next_start(connected: Connect) -> None:
    fence = Fence(connected(2), SERVICE)
    async with registered(connected) as old, registered(connected) as new:
        fenced = await old.open()
        await old.publish()
        assert await fence.close_out("decode-0", fenced)
        assert await read(connected) == {}
        await old.publish()
        assert await read(connected) == {}

        generation = await new.open()
        await new.publish()
        assert await read(connected) == {"decode-0": generation}
    await fence.close()


async def test_a_registry_that_lost_its_data_repeats_no_generation(connected: Connect) -> None:
    async with (
        registered(connected) as registration,
        registered(connected, "decode-1") as later,
        client(connected) as raw,
    ):
        generation = await registration.open()
        await raw.delete(registry.generation_key(SERVICE))
        await registration.publish()

        assert await later.open() > generation


async def test_claims_come_to_the_index_and_leave_it_with_a_newer_generation(connected: Connect) -> None:
    async with followed(connected) as (membership, index, poll):
        async with fed(connected, 5) as feed:
            await feed.open()
            feed.changed(PrefixClaimChange({11: True, 12: True}))
            await feed.exchange()
            feed.changed(PrefixClaimChange({12: False, 13: True}))
            await feed.exchange()
            member(membership, 5, feed.claims_sequence)
            await poll()
            assert device(index) == {11, 13}

        async with fed(connected, 6) as newer:
            await newer.open()
            newer.changed(PrefixClaimChange({21: True}))
            await newer.exchange()
            member(membership, 6, newer.claims_sequence)
            await poll()
            assert device(index) == {21}
            await feed_is_superseded(connected)


async def feed_is_superseded(connected: Connect) -> None:
    async with fed(connected, 5) as older:
        with pytest.raises(StartError):
            await older.open()
        older.changed(PrefixClaimChange({31: True}))
        await older.exchange()
        assert older.is_superseded


async def test_claims_that_redis_lost_are_written_anew(connected: Connect) -> None:
    async with followed(connected) as (membership, index, poll), fed(connected, 5) as feed, client(connected) as raw:
        await feed.open()
        feed.changed(PrefixClaimChange({11: True}))
        await feed.exchange()
        await raw.delete(registry.claims_key(SERVICE, "decode-0"), registry.snapshot_key(SERVICE, "decode-0"))
        feed.changed(PrefixClaimChange({12: True}))
        for _ in range(3):
            await feed.exchange()
        member(membership, 5, feed.claims_sequence)
        await poll()

        assert feed.counters.losses == 1
        assert device(index) == {11, 12}


async def test_accesses_are_counted_in_order_and_their_snapshot_replaces_only_its_own_base(connected: Connect) -> None:
    async with client(connected) as raw:
        names = [await raw.xadd("accesses", {"b": b"x", "n": number}, maxlen=100) for number in range(3)]
        assert names == sorted(names)
        page = await raw.xrange("accesses", names[1].decode(), "+", count=1)
        assert page == [(names[1], {b"b": b"x", b"n": b"1"})]

        script = access_log.WRITE_SNAPSHOT
        assert await raw.eval(script, 2, "accesses", "hotness", b"", b"snapshot" * 8, 0, 60_000) == 1
        assert await raw.eval(script, 2, "accesses", "hotness", b"", b"another" * 8, 0, 60_000) == 0
        assert await raw.get("hotness") == b"snapshot" * 8


async def test_the_lease_of_copying_is_held_by_one(connected: Connect) -> None:
    async with client(connected) as raw:
        held = [await raw.eval(replicator.HOLD, 1, "replication", who, 100) for who in ("a", "b", "a")]
        assert held == [1, 0, 1]

        await asyncio.sleep(0.15)

        assert await raw.eval(replicator.HOLD, 1, "replication", "b", 100) == 1


async def test_a_stream_keeps_its_last_id_whatever_is_trimmed_or_deleted_of_it(connected: Connect) -> None:
    async with client(connected) as raw:
        for number in range(1, 5):
            await raw.xadd("claims", {"b": b"x"}, id=f"7-{number}")
        assert await raw.xdel("claims", "7-4", "7-9") == 1
        assert await raw.xtrim("claims", minid="7-2", approximate=False) == 1

        assert [name for name, _ in await raw.xrange("claims")] == [b"7-2", b"7-3"]
        assert [name for name, _ in await raw.xrange("claims", min="(7-2")] == [b"7-3"]
        assert [name for name, _ in await raw.xrange("claims", "7", count=1)] == [b"7-2"]
        assert await raw.xtrim("claims", maxlen=0, approximate=False) == 2
        assert await raw.xrange("claims") == []
        assert (await raw.xinfo_stream("claims"))["last-generated-id"] == b"7-4"
        with pytest.raises(redis.ResponseError, match="equal or smaller"):
            await raw.xadd("claims", {"b": b"x"}, id="7-4")
        with pytest.raises(redis.ResponseError, match="no such key"):
            await raw.xinfo_stream("nothing")


async def test_a_key_of_another_kind_answers_with_an_error_and_hides_no_other(connected: Connect) -> None:
    async with client(connected) as raw:
        await raw.set("one", "value")
        await raw.xadd("other", {"b": b"x"}, id="1-1")

        async with raw.pipeline(transaction=False) as pipeline:
            pipeline.xrange("one", "1-1", count=2)
            pipeline.xrange("other", "1-1", count=2)
            pipeline.get("one")
            pipeline.exists("one")
            pipeline.exists("nothing")
            assert len(pipeline) == 5
            error, *answers = await pipeline.execute(raise_on_error=False)

        assert isinstance(error, redis.ResponseError)
        assert "WRONGTYPE" in str(error)
        assert answers == [[(b"1-1", {b"b": b"x"})], b"value", 1, 0]


async def test_a_key_that_is_set_again_or_deleted_loses_its_expiry(connected: Connect) -> None:
    async with client(connected) as raw:
        for key in ("set", "deleted", "expires"):
            await raw.set(key, "value", px=50)
        await raw.set("set", "again")
        await raw.delete("deleted", "nothing")
        await raw.xadd("deleted", {"b": b"x"})

        await asyncio.sleep(0.1)

        assert await raw.mget(["set", "expires"]) == [b"again", None]
        assert await raw.exists("set", "deleted", "expires", "nothing") == 2


async def test_a_hash_has_the_fields_that_were_set_and_not_taken_out(connected: Connect) -> None:
    async with client(connected) as raw:
        assert await raw.hset("fields", "a", b"1") == 1
        assert await raw.hset("fields", "a", b"2") == 0
        await raw.hset("fields", "b", b"3")
        assert await raw.hgetall("fields") == {b"a": b"2", b"b": b"3"}
        assert await raw.hdel("fields", "b", "nothing") == 1
        assert await raw.hgetall("fields") == {b"a": b"2"}
        assert await raw.hgetall("nothing") == {}


def member_of(worker_id: str) -> Membership:
    """A service of one worker, as one router sees it."""
    membership = Membership()
    ready = wire.WORKER_STATE_READY
    membership.replace(
        [wire.WorkerRegistration(worker_id=worker_id, generation=1, pool=wire.POOL_DECODE, state=ready, address="a:1")]
    )
    for member in membership.members():
        member.version_skew = ""
    return membership


async def test_routers_hear_what_the_others_have_and_no_more_once_they_are_gone(connected: Connect) -> None:
    async with client(connected) as first, client(connected) as second:
        one, other = member_of("decode-0"), member_of("decode-0")
        sharing = LoadSharing(first, "svc", one, router_id="one", every_s=1.0, roles=lambda: (0.25, 3))
        listening = LoadSharing(second, "svc", other, router_id="other", every_s=1.0)
        one.acquire(one.usable(wire.POOL_DECODE)[0], Work(10), 0.0)

        await sharing.share()
        await listening.share()
        assert other.candidates(wire.POOL_DECODE, 0.0).in_flight_tokens.tolist() == [10.0]
        assert one.candidates(wire.POOL_DECODE, 0.0).in_flight_tokens.tolist() == [10.0], "its own once"
        assert (one.others.prefill_rate(0.0), one.others.prefill_heavy) == (0.0, 0)
        assert (other.others.prefill_rate(0.0), other.others.prefill_heavy) == (0.25, 3)

        await sharing.close()
        await listening.share()
        assert other.candidates(wire.POOL_DECODE, 0.0).in_flight_tokens.tolist() == [0.0]
        assert len(other.others) == 0


async def test_what_another_router_wrote_that_cannot_be_read_is_left_out(connected: Connect) -> None:
    async with client(connected) as raw, client(connected) as own:
        await raw.hset(registry.loads_key("svc"), "strange", b"\xff\xff")
        sharing = LoadSharing(own, "svc", member_of("decode-0"), router_id="one", every_s=1.0)

        await sharing.share()

        assert sharing.damaged == 1


async def test_a_flushed_server_has_nothing(connected: Connect) -> None:
    async with client(connected) as raw:
        await raw.set("value", 1)
        await raw.sadd("members", "a", "b")
        assert set(await raw.smembers("members")) == {b"a", b"b"}
        await raw.flushall()

        assert await raw.exists("value", "members") == 0
        assert not await raw.smembers("members")


async def test_a_server_that_is_down_raises_what_the_production_code_waits_out() -> None:
    store = Store()
    store.is_down = True
    local = LocalRedis(store, Network(Random(0)), "test", 0.1)

    with pytest.raises(REDIS_DOWN):
        await local.get("anything")


async def test_a_link_that_is_cut_lets_calls_run_into_their_timeout() -> None:
    network = Network(Random(0))
    local = LocalRedis(Store(), network, "test", 0.05)
    network.link("test", "redis").cut()

    with pytest.raises(redis.TimeoutError):
        await local.get("anything")


@asynccontextmanager
async def followed(connected: Connect) -> AsyncIterator[tuple[Membership, PrefixIndex, Callable[[], Awaitable[None]]]]:
    membership, index = Membership(), PrefixIndex(1024, 600, 0)
    follower = IndexFollower(connected(2), SERVICE, membership, index, IndexSection())
    try:
        yield membership, index, follower.poll
    finally:
        await follower.close()


def member(membership: Membership, generation: int, sequence: int) -> None:
    record = wire.WorkerRegistration(
        worker_id="decode-0", generation=generation, pool=wire.POOL_DECODE, claims_sequence=sequence
    )
    membership.replace([record])


def device(index: PrefixIndex) -> set[int]:
    return set(index.claims("decode-0")[0].tolist())
