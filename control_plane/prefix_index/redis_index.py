"""Keeps a `PrefixIndex` in step with what the workers write to Redis. Redis is never on a request's path.

Every `refresh_s`, and less often while nothing comes, the streams of all registered workers are read after what was
applied (`claim_following` decides), until there is nothing left to read. Missing batches are repaired from the worker's
snapshot; where that does not reach, the worker is asked for another one. The registrations say who counts: a worker
whose lease has ended, and the claims of an older generation, leave the index at once.

Redis that does not answer leaves the index as it was: requests go on, `staleness_s` grows. When it answers again,
following goes on where it stood, or from snapshots where that is not possible.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import redis.asyncio as redis
from redis.exceptions import ClusterDownError, ReadOnlyError, RedisClusterException, TryAgainError

from cluster_configs.schema import IndexSection
from cluster_core.clock import monotonic_s
from cluster_wire import registry
from cluster_wire.easing_pause import EasingPause
from cluster_wire.redis_client import RedisClient
from cluster_wire.redis_loop import LoopWords, RedisLoop
from control_plane.fleet.membership import Membership
from control_plane.prefix_index.claim_following import (
    Apply,
    FeedCounts,
    Instruction,
    Mode,
    Replace,
    Restart,
    SilenceWatch,
    WorkerFeed,
    slices,
)
from control_plane.prefix_index.index import PrefixIndex
from control_plane.prefix_index.loop_slices import LoopSlices
from kv_transfer.claims.claims import (
    ClaimChange,
    DamagedClaimsError,
    decode_batch,
    decode_snapshot,
    no_keys,
)

logger = logging.getLogger(__name__)

_WORDS = LoopWords(
    logger,
    away="Redis does not answer, the prefix index stays as it is: %s",
    back="Redis answers again, the prefix index is followed",
    defect="the prefix index could not be followed and is read again",
)

# A request for a snapshot is made again when nobody has taken it up for so long.
_RESYNC_S = 5
# Read at once: what the client parses without a pause stays below two milliseconds.
_ENTRIES_A_READ = 8
_WORKERS_A_READ = 16
_ROUNDS_A_POLL = 64
# Of one worker; what is left is for the next poll.
MOST_ENTRIES_A_POLL = _ROUNDS_A_POLL * _ENTRIES_A_READ
_KEYS_A_SLICE = 1024
# However long nothing has come, the index is looked at so often before it would be too old to be believed.
_LOOKS_BEFORE_STALE = 4
# KEYS: resync. ARGV: how long the request for a snapshot stays, in s. The first write needs no memory: a full Redis
# lets it through.
ASK = """
redis.call('EXPIRE', KEYS[1], ARGV[1])
redis.call('SET', KEYS[1], 1, 'EX', ARGV[1])
return 1
"""
# Answers that are about Redis as a whole; other errors are about the one key that was asked for.
_NO_ANSWER = (
    redis.ConnectionError,
    redis.TimeoutError,
    ClusterDownError,
    TryAgainError,
    ReadOnlyError,
    RedisClusterException,
    OSError,
)


@dataclass(frozen=True, slots=True)
class WorkerFeedHealth:
    """How far one worker is followed. lag_batches: told of and not applied yet.

    silent: it finishes requests and has told of no block for `index.silent_after_s`.
    """

    worker_id: str
    generation: int
    sequence: int
    lag_batches: int
    in_sync: bool
    silent: bool


@dataclass(frozen=True, slots=True)
class IndexHealth:
    """How far the index can be believed. staleness_s: since all workers' streams were last read.

    stale: that is more than `index.max_staleness_s`, placement must not use the index.
    """

    connected: bool
    staleness_s: float
    stale: bool
    workers: tuple[WorkerFeedHealth, ...]
    counts: FeedCounts

    @property
    def silent_workers(self) -> tuple[str, ...]:
        return tuple(worker.worker_id for worker in self.workers if worker.silent)

    @property
    def workers_out_of_sync(self) -> tuple[str, ...]:
        return tuple(worker.worker_id for worker in self.workers if not worker.in_sync)


@dataclass(slots=True)
class _Followed:
    """A registered worker."""

    feed: WorkerFeed
    silence: SilenceWatch
    generation: int = 0
    claims_sequence: int = 0


class IndexFollower:
    """`follow` until cancelled, then `close`. `membership_changed` is called whenever the registrations were read.

    is_fit: whether a worker whose blocks have so many tokens tells of the chunks that the router asks for.
    """

    def __init__(
        self,
        redis: RedisClient,
        service_id: str,
        membership: Membership,
        index: PrefixIndex,
        settings: IndexSection,
        *,
        is_fit: Callable[[int], bool] = lambda block_tokens: True,
        now_s: Callable[[], float] = monotonic_s,
        make_feed: Callable[[FeedCounts], WorkerFeed] = WorkerFeed,
    ) -> None:
        self._redis = redis
        self._service_id = service_id
        self._membership = membership
        self._index = index
        self._settings = settings
        self._is_fit = is_fit
        self._now_s = now_s
        self._make_feed = make_feed
        self._workers: dict[str, _Followed] = {}
        self._counts = FeedCounts()
        self._complete_s = now_s()
        self._slices = LoopSlices()
        # Of the keys of single workers, in this poll.
        self._errors = 0
        self._misfits: set[tuple[str, int]] = set()
        # Between polls.
        self.pause = EasingPause(settings.refresh_s, settings.max_staleness_s / _LOOKS_BEFORE_STALE, now_s)
        self._loop = RedisLoop(self.poll, self.pause, _WORDS, on_defect=self._forget_all)

    @property
    def connected(self) -> bool:
        return self._loop.connected

    async def follow(self) -> None:
        await self._loop.run()

    async def close(self) -> None:
        await self._redis.aclose()

    def membership_changed(self) -> None:
        """Takes over which workers count. No I/O; also done by each poll."""
        now = self._now_s()
        members = {str(member.worker_id): member.registration for member in self._membership.members()}
        for gone in self._workers.keys() - members.keys():
            del self._workers[gone]
            self._index.leave(gone)
        for worker_id, record in members.items():
            followed = self._workers.get(worker_id)
            if followed is None:
                feed, silence = self._make_feed(self._counts), SilenceWatch(self._settings.silent_after_s)
                followed = self._workers[worker_id] = _Followed(feed, silence)
            followed.generation, followed.claims_sequence = record.generation, record.claims_sequence
            self._complain_of_misfit(worker_id, record.block_size_tokens)
            followed.silence.observe(record.cacheable_requests, record.stored_blocks, now)
            for instruction in followed.feed.registered(record.generation, record.claims_sequence, now):
                if isinstance(instruction, Restart):
                    self._index.join(worker_id, instruction.generation)
            if followed.feed.lag(record.generation, record.claims_sequence):
                self.pause.came()

    async def poll(self) -> None:
        """Reads what there is. Raises one of REDIS_DOWN."""
        self.membership_changed()
        self._errors = 0
        wanted: Sequence[str] = list(self._workers)
        for _ in range(_ROUNDS_A_POLL):
            more: list[str] = []
            for start in range(0, len(wanted), _WORKERS_A_READ):
                more += await self._read(wanted[start : start + _WORKERS_A_READ])
            wanted = more
            if not wanted:
                break
        if not wanted and not self._errors:
            self._complete_s = self._now_s()

    def is_stale(self) -> bool:
        return self._staleness_s() > self._settings.max_staleness_s

    def health(self) -> IndexHealth:
        now = self._now_s()
        workers = tuple(
            WorkerFeedHealth(
                worker_id=worker_id,
                generation=followed.feed.generation,
                sequence=followed.feed.sequence,
                lag_batches=followed.feed.lag(followed.generation, followed.claims_sequence),
                in_sync=followed.feed.in_sync,
                silent=followed.silence.is_silent(now),
            )
            for worker_id, followed in sorted(self._workers.items())
        )
        return IndexHealth(self._loop.connected, self._staleness_s(), self.is_stale(), workers, replace(self._counts))

    def check_invariants(self) -> None:
        assert set(self._index.workers) == set(self._workers), "the index holds other workers than are registered"
        for worker_id, followed in self._workers.items():
            followed.feed.check_invariants()
            assert self._index.generation(worker_id) == followed.feed.generation, f"{worker_id}: another generation"

    def _complain_of_misfit(self, worker_id: str, block_tokens: int) -> None:
        """Once: nothing that the worker claims is ever found. 0: its engine is starting."""
        if not block_tokens or (worker_id, block_tokens) in self._misfits or self._is_fit(block_tokens):
            return
        self._misfits.add((worker_id, block_tokens))
        logger.error(
            "%s has blocks of %d tokens, with which chunks are not those of engine.block_size_tokens: "
            "its cached prefixes will not be found",
            worker_id,
            block_tokens,
        )

    def _staleness_s(self) -> float:
        return self._now_s() - self._complete_s

    async def _forget_all(self) -> None:
        """Whatever was being applied may be half in the index: all of it is taken in again."""
        for worker_id in self._workers:
            self._index.leave(worker_id)
        self._workers.clear()

    async def _read(self, worker_ids: Iterable[str]) -> list[str]:
        """One round trip for these workers; returns those of which there is more to read."""
        asked = [(each, self._workers[each].feed) for each in worker_ids if each in self._workers]
        modes = [feed.mode for _, feed in asked]
        async with self._redis.pipeline(transaction=False) as pipeline:
            for worker_id, feed in asked:
                self._request(pipeline, worker_id, feed)
            answers = await pipeline.execute(raise_on_error=False)
        self._slices.begin()
        self._raise_outage(answers)
        self._errors += sum(isinstance(answer, Exception) for answer in answers)
        more = []
        for (worker_id, feed), mode, answer in zip(asked, modes, answers, strict=True):
            if await self._take(worker_id, feed, mode, answer):
                more.append(worker_id)
        await self._ask_for_snapshots(
            [
                each
                for each, mode in zip(asked, modes, strict=True)
                if (mode, each[1].mode) == (Mode.LOST, Mode.REQUESTED)
            ]
        )
        return more

    def _request(self, pipeline: Any, worker_id: str, feed: WorkerFeed) -> None:
        """XRANGE does for XREAD, whose keys a cluster's client would have to ask the server for."""
        if feed.mode is Mode.FOLLOWING:
            after = f"{feed.generation}-{feed.sequence + 1}"
            pipeline.xrange(registry.claims_key(self._service_id, worker_id), after, count=_ENTRIES_A_READ)
        elif feed.mode is Mode.LOST:
            pipeline.get(registry.snapshot_key(self._service_id, worker_id))
        else:
            pipeline.exists(registry.resync_key(self._service_id, worker_id))

    @staticmethod
    def _raise_outage(answers: Iterable[Any]) -> None:
        for answer in answers:
            if isinstance(answer, _NO_ANSWER):
                raise answer

    async def _take(self, worker_id: str, feed: WorkerFeed, mode: Mode, answer: Any) -> bool:
        """What was read for a worker in this mode; True when there is more to read at once."""
        if mode is Mode.FOLLOWING:
            return await self._take_batches(worker_id, feed, answer)
        self.pause.came()
        if mode is Mode.LOST:
            await self._take_snapshot(worker_id, feed, answer)
            return feed.mode is Mode.FOLLOWING
        if answer == 0:
            feed.answered(self._now_s())
        return feed.mode is Mode.LOST

    async def _take_batches(self, worker_id: str, feed: WorkerFeed, entries: Any) -> bool:
        if isinstance(entries, Exception):
            logger.error("the claims of %s cannot be read: %s", worker_id, entries)
            await self._carry_out(worker_id, feed, feed.damaged(feed.generation, feed.sequence + 1))
            return feed.mode is Mode.LOST
        if entries:
            self.pause.came()
        for name, fields in entries:
            await self._carry_out(worker_id, feed, _batch(feed, name, fields))
        return feed.mode is Mode.LOST or len(entries) == _ENTRIES_A_READ

    async def _take_snapshot(self, worker_id: str, feed: WorkerFeed, data: Any) -> None:
        snapshot = None
        if isinstance(data, bytes):
            try:
                # It may hold millions of keys.
                snapshot = await asyncio.to_thread(decode_snapshot, data)
            except DamagedClaimsError as error:
                logger.error("the snapshot of %s is damaged: %s", worker_id, error)
                self._counts.damaged += 1
        await self._carry_out(worker_id, feed, feed.snapshot(snapshot))

    async def _carry_out(self, worker_id: str, feed: WorkerFeed, instructions: Iterable[Instruction]) -> None:
        """In slices. While a snapshot is taken in, the worker holds a part of it."""
        generation = feed.generation
        for instruction in instructions:
            if not self._is_followed(worker_id, feed, generation):
                return
            match instruction:
                case Restart(generation):
                    self._index.join(worker_id, generation)
                case Apply(change):
                    await self._apply(worker_id, feed, change)
                case Replace(snapshot):
                    self._index.replace(worker_id, no_keys(), no_keys())
                    change = ClaimChange(device_stored=snapshot.device, host_stored=snapshot.host)
                    await self._apply(worker_id, feed, change)

    async def _apply(self, worker_id: str, feed: WorkerFeed, change: ClaimChange) -> None:
        generation = feed.generation
        for part in slices(change, _KEYS_A_SLICE):
            if not self._is_followed(worker_id, feed, generation):
                return
            self._index.apply(worker_id, part)
            await self._slices.rest()

    def _is_followed(self, worker_id: str, feed: WorkerFeed, generation: int) -> bool:
        """Registrations may have changed while others had the event loop."""
        followed = self._workers.get(worker_id)
        return followed is not None and followed.feed is feed and feed.generation == generation

    async def _ask_for_snapshots(self, asked: Sequence[tuple[str, WorkerFeed]]) -> None:
        if not asked:
            return
        async with self._redis.pipeline(transaction=False) as pipeline:
            for worker_id, _ in asked:
                pipeline.eval(ASK, 1, registry.resync_key(self._service_id, worker_id), _RESYNC_S)
            answers = await pipeline.execute(raise_on_error=False)
        for (_, feed), answer in zip(asked, answers, strict=True):
            if isinstance(answer, Exception):
                feed.refused(self._now_s() + _RESYNC_S)
        self._raise_outage(answers)


def _batch(feed: WorkerFeed, name: bytes, fields: dict[bytes, bytes]) -> list[Instruction]:
    """What a stream's entry says. One that does not hold what its name says is damaged."""
    generation, sequence = (int(part) for part in name.split(b"-"))
    try:
        batch = decode_batch(fields[b"b"])
    except (DamagedClaimsError, KeyError):
        return feed.damaged(generation, sequence)
    if (batch.generation, batch.sequence) != (generation, sequence):
        return feed.damaged(generation, sequence)
    return feed.batch(batch)
