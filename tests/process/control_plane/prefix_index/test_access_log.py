"""All routers count the same requests, each once, whatever their clocks say and whenever Redis is away."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest
import redis

from cluster_core.clock import unix_ms
from cluster_wire import registry
from cluster_wire.redis_client import connect
from control_plane.prefix_index import access_log
from control_plane.prefix_index.access_log import MOST_BUFFERED_KEYS, SnapshotTiming
from control_plane.prefix_index.hotness_snapshot import HotnessSnapshot, encode_snapshot
from kv_transfer.claims.claims import ClaimChange
from tests.fakes.cluster import until
from tests.fakes.redis_server import running_redis
from tests.process.control_plane.prefix_index.access_routers import NEARLY, SERVICE, Router, prompt

pytestmark = pytest.mark.integration

MakeRouter = Callable[..., Router]


@pytest.fixture(scope="module", params=[False, True], ids=["single", "cluster"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_redis(tmp_path_factory.mktemp("redis"), is_cluster=request.param) as url:
        yield url


@pytest.fixture
async def client(server: str) -> AsyncIterator[Any]:
    client = connect(server, timeout_s=5.0)
    await client.flushall()
    yield client
    await client.aclose()


@pytest.fixture
async def make_router(server: str, client: Any) -> AsyncIterator[MakeRouter]:
    routers: list[Router] = []

    def make(**options: Any) -> Router:
        routers.append(Router(server, f"router-{len(routers)}", **options))
        return routers[-1]

    yield make
    for router in routers:
        await router.log.close()


async def test_every_router_counts_every_request_once(make_router: MakeRouter) -> None:
    one, other = make_router(), make_router()
    shared, own = prompt(1), prompt(2, chunks=300)
    for router in (one, other):
        await router.polls()
    for _ in range(3):
        one.log.record(shared)
    one.log.record(own)
    other.log.record(shared)
    for router in (one, other, one, other):
        await router.polls()

    for router in (one, other):
        assert router.requests(shared) == pytest.approx(4.0, abs=NEARLY)
        assert router.requests(own) == pytest.approx(1.0, abs=NEARLY)
        assert router.requests(prompt(3)) == 0.0


async def test_polls_come_often_once_a_request_is_recorded_here_or_read_from_another_router(
    make_router: MakeRouter,
) -> None:
    one, other = make_router(), make_router()
    await one.polls()
    assert one.pause.times == 0
    one.log.record(prompt(1))
    assert (one.pause.times, other.pause.times) == (1, 0)
    await one.polls()
    await other.polls()
    assert (one.pause.times > 1, other.pause.times) == (True, 1)
    await other.polls()
    assert other.pause.times == 1, "nothing new has come"


async def test_clocks_of_hosts_do_not_matter(make_router: MakeRouter) -> None:
    """A router an hour ahead and one an hour behind: an access is as old as its entry, by Redis's clock."""
    ahead, behind = make_router(ahead_ms=3_600_000), make_router(ahead_ms=-3_600_000)
    claimed, asked_for = prompt(2), prompt(1)
    for router in (ahead, behind):
        router.index.join("prefill-0", 1)
        router.index.apply("prefill-0", ClaimChange(device_stored=np.concatenate((claimed, asked_for))))
        router.log.record(asked_for)
        await router.polls()
    await ahead.polls()

    for router in (ahead, behind):
        assert router.requests(asked_for) == pytest.approx(2.0, abs=NEARLY)
        assert router.requests(claimed) == 0.0
        assert router.log.now_s() == pytest.approx(unix_ms() / 1000, abs=1.0)


async def test_a_stream_that_is_named_by_a_time_to_come_counts_as_of_now(make_router: MakeRouter, client: Any) -> None:
    """Redis's clock was two hours ahead when an entry was written, and is right again."""
    router, late = make_router(snapshots=SnapshotTiming(after_keys=0)), make_router()
    ahead, right = (next(p for p in map(prompt, range(99)) if int(p[0]) % registry.FAMILIES == each) for each in (0, 1))
    await client.xadd(registry.accesses_key(SERVICE, 0), {"b": b""}, id=f"{unix_ms() + 7_200_000}-0")
    snapshots = []
    for _ in range(3):
        for keys in (ahead, right):
            router.log.record(keys)
            await router.polls()
            assert router.log.now_s() == pytest.approx(unix_ms() / 1000, abs=1.0)
        snapshots.append(await client.get(registry.hotness_key(SERVICE, 0)))
    await late.polls()

    assert len(set(snapshots)) == 3, "it is summed up all the same"
    for each in (router, late):
        assert [each.requests(keys) for keys in (ahead, right)] == pytest.approx([3.0, 3.0], abs=NEARLY)


async def test_while_redis_is_away_a_router_counts_its_own_requests_and_later_none_twice(
    make_router: MakeRouter,
) -> None:
    one, other = make_router(), make_router()
    one.log.record(prompt(1))
    await one.polls()
    following = asyncio.create_task(one.log.follow())
    one.client.fails_before = True
    await until(lambda: not one.log.connected)
    one.log.record(prompt(1))
    one.log.record(prompt(2))
    await until(lambda: one.requests(prompt(2)) > 0.5)
    assert one.requests(prompt(1)) == pytest.approx(2.0, abs=NEARLY)

    one.client.fails_before = False
    await until(lambda: one.log.connected)
    one.log.record(prompt(3))
    await until(lambda: one.requests(prompt(3)) > 0.5)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    await other.polls()

    assert [one.requests(prompt(each)) for each in (1, 2, 3)] == pytest.approx([2.0, 1.0, 1.0], abs=NEARLY)
    assert [other.requests(prompt(each)) for each in (1, 2, 3)] == pytest.approx([1.0, 0.0, 1.0], abs=NEARLY)


async def test_an_entry_that_arrived_without_a_confirmation_counts_once(make_router: MakeRouter) -> None:
    one, other = make_router(), make_router()
    await one.polls()
    one.client.fails_after = True
    one.log.record(prompt(1))
    with pytest.raises(redis.TimeoutError):
        await one.log.poll()
    one.client.fails_after = False
    one.log.record(prompt(1))
    await one.polls(3)
    await other.polls()

    assert one.requests(prompt(1)) == pytest.approx(2.0, abs=NEARLY)
    assert other.requests(prompt(1)) == pytest.approx(2.0, abs=NEARLY)


async def test_what_waits_to_be_written_is_bounded(make_router: MakeRouter) -> None:
    router = make_router()
    long = prompt(1, chunks=1000)
    for _ in range(MOST_BUFFERED_KEYS // 1000 + 5):
        router.log.record(long)

    assert router.log.dropped == 5
    router.log.record(prompt(2, chunks=0))
    assert router.log.dropped == 5


async def test_a_router_that_starts_takes_in_the_snapshot_and_what_came_after(
    make_router: MakeRouter, client: Any
) -> None:
    one = make_router(snapshots=SnapshotTiming(after_keys=20, keep_s=0.0))
    hot = prompt(1)
    for _ in range(8):
        one.log.record(hot)
        await one.polls()
    family = int(hot[0]) % registry.FAMILIES
    assert await client.exists(registry.hotness_key(SERVICE, family))
    assert await client.xlen(registry.accesses_key(SERVICE, family)) < 8

    other = make_router()
    await other.polls()

    assert other.requests(hot) == pytest.approx(8.0, abs=NEARLY)
    assert one.requests(hot) == pytest.approx(8.0, abs=NEARLY)


async def test_of_two_snapshots_made_from_the_same_one_only_the_first_is_written(
    make_router: MakeRouter, client: Any
) -> None:
    """Entries that only the first one sums up are gone."""
    forgetful = SnapshotTiming(keep_s=0.0)
    one, other = make_router(snapshots=forgetful), make_router(snapshots=forgetful)
    hot = prompt(1)
    family = int(hot[0]) % registry.FAMILIES
    one.log.record(hot)
    await one.polls()
    await other.polls()
    for _ in range(3):
        one.log.record(hot)
        await one.polls()
        await asyncio.sleep(0.002)
    other.client.first.append(lambda: one.log.sum_up(family))
    await other.log.sum_up(family)
    late = make_router()
    await late.polls()

    assert not other.client.first
    assert late.requests(hot) == pytest.approx(4.0, abs=NEARLY)


async def test_a_snapshot_counts_nothing_that_the_one_before_has_counted(make_router: MakeRouter) -> None:
    one = make_router(snapshots=SnapshotTiming(after_keys=0, every_s=0.0))
    for _ in range(5):
        one.log.record(prompt(1))
        await one.polls()
        await asyncio.sleep(0.002)
    late = make_router()
    await late.polls()

    assert late.requests(prompt(1)) == pytest.approx(5.0, abs=NEARLY)


async def test_snapshots_are_made_beside_the_event_loop(
    make_router: MakeRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    def noted(snapshot: HotnessSnapshot) -> bytes:
        threads.append(threading.current_thread())
        return encode_snapshot(snapshot)

    # Nothing but the thread tells it apart from one that is made on the loop.
    monkeypatch.setattr(access_log, "encode_snapshot", noted)
    router = make_router(snapshots=SnapshotTiming(after_keys=0))
    router.log.record(prompt(1))
    await router.polls()

    assert threads
    assert threading.main_thread() not in threads


async def test_a_late_snapshot_is_not_made_again(make_router: MakeRouter, client: Any) -> None:
    router = make_router(snapshots=SnapshotTiming(after_keys=0))
    key = registry.hotness_key(SERVICE, int(prompt(1)[0]) % registry.FAMILIES)
    router.log.record(prompt(1))
    await router.polls()
    first = await client.get(key)
    router.log.record(prompt(1))
    await router.polls()

    assert first is not None
    assert await client.get(key) == first


async def test_damaged_entries_and_snapshots_are_left_out(make_router: MakeRouter, client: Any) -> None:
    router = make_router()
    family = int(prompt(1)[0]) % registry.FAMILIES
    stream = registry.accesses_key(SERVICE, family)
    await client.set(registry.hotness_key(SERVICE, family), b"junk")
    for fields in ({"b": b"\xff\xff"}, {"x": b""}, {"b": b"\x12\x03abc"}):
        await client.xadd(stream, fields)
    router.log.record(prompt(1))
    await router.polls()

    assert router.requests(prompt(1)) == pytest.approx(1.0, abs=NEARLY)
    assert router.log.damaged == 4


async def test_a_redis_that_lost_its_data_and_goes_on_with_an_earlier_clock_is_followed(
    make_router: MakeRouter, client: Any
) -> None:
    router = make_router()
    stream = registry.accesses_key(SERVICE, int(prompt(1)[0]) % registry.FAMILIES)
    await client.xadd(stream, {"b": b""}, id=f"{unix_ms() + 5_000_000}-0")
    await router.polls()
    await client.flushall()
    for _ in range(3):
        router.log.record(prompt(1))
        await router.polls()

    assert router.requests(prompt(1)) == pytest.approx(3.0, abs=NEARLY)


async def test_what_a_service_leaves_goes_by_itself(make_router: MakeRouter, client: Any) -> None:
    """Those that have no name have another one with each start."""
    router = make_router(snapshots=SnapshotTiming(after_keys=0))
    family = int(prompt(1)[0]) % registry.FAMILIES
    keys = registry.accesses_key(SERVICE, family), registry.hotness_key(SERVICE, family)
    for _ in range(2):
        router.log.record(prompt(1))
        await router.polls()
        for key in keys:
            assert registry.KEPT_MS - 60_000 < await client.pttl(key) <= registry.KEPT_MS
            await client.pexpire(key, 60_000)


async def test_a_hot_prefix_outlives_a_flood_of_prompts_that_nobody_repeats(make_router: MakeRouter) -> None:
    """A tenant tries to fill small indexes, and the snapshots that a late router begins with."""
    snapshots = SnapshotTiming(after_keys=500, every_s=0.0, most_keys=64, keep_s=0.0)
    router = make_router(entries=1024, snapshots=snapshots)
    hot = prompt(1, chunks=8)
    for _ in range(20):
        router.log.record(hot)
    await router.polls()
    for seed in range(100, 2100):
        router.log.record(prompt(seed, chunks=8))
        if seed % 100 == 0:
            await router.polls()
    await router.polls()
    late = make_router(entries=1024)
    await late.polls()

    assert router.index.dropped > 10_000
    for each in (router, late):
        assert each.requests(hot) == pytest.approx(20.0, rel=0.05)
