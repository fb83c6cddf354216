"""Which prefixes the requests of the whole cluster ask for: each router's requests, told to all routers through Redis.

A router writes the chunks of the requests that it placed to the stream of their family, and counts what it reads there,
its own included: so all routers count the same. An access is as old as its entry, by Redis's clock: the clocks of the
hosts do not matter. Where that one is set, what is hot stays so; a stream that was written to while it was ahead names
its entries by that time until it has come, and they count as of now. Once a family's stream has grown, its hotness is
summed up in a snapshot and older entries go.

While Redis does not answer, a router counts its own requests by itself and nobody else hears of them. What was on its
way is remembered by number, and not counted a second time should it have arrived.

    who counts an access     when
    every router             its entry is read
    the one that placed it   Redis is away, or did not confirm the entry: at once, and never again
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from rachis.v1 import worker_pb2 as wire

from cluster_configs.schema import IndexSection
from cluster_core.clock import ClusterClock
from cluster_wire import registry
from cluster_wire.easing_pause import EasingPause
from cluster_wire.redis_client import REDIS_DOWN, RedisClient
from cluster_wire.redis_loop import LoopWords, RedisLoop
from control_plane.prefix_index.hotness_snapshot import (
    BEGINNING,
    NAME_BYTES,
    Access,
    DamagedSnapshotError,
    EntryName,
    HotnessSnapshot,
    decode_snapshot,
    encode_snapshot,
    entry_name,
    summed_up,
)
from control_plane.prefix_index.index import PrefixIndex
from control_plane.prefix_index.loop_slices import LoopSlices
from kv_transfer.claims.prefix_chunks import Keys

logger = logging.getLogger(__name__)

_WORDS = LoopWords(
    logger,
    away="Redis does not answer, requests are counted by this router alone: %s",
    back="Redis answers again, requests are counted by all routers",
    defect="accesses cannot be followed",
)

# Keys of requests that wait to be written; what comes on top is not counted.
MOST_BUFFERED_KEYS = 1 << 18
_KEYS_AN_ENTRY = 1 << 13
_ENTRIES_A_READ = 32
_ROUNDS_A_POLL = 64
_MOST_ENTRIES = 1 << 14
_MOST_UNCONFIRMED = 1024
_KEYS_A_SLICE = 1024
_MOST_SUMMED_KEYS = 1 << 20
# What was hot so many half-lives ago is not told from what was not.
_KEPT_HALF_LIVES = 32

# KEYS: any, for the node of a cluster whose clock counts. Redis's time, in seconds and microseconds.
SAY_TIME = """
return redis.call('TIME')
"""
# KEYS: stream, snapshot. ARGV: how the snapshot began that this one goes on from, this one, the oldest entry that
# stays, how long it is kept, in ms. Drops the entries that nobody will ask for, and writes the snapshot, unless
# somebody else has written one meanwhile. In this order a full Redis lets it through.
WRITE_SNAPSHOT = f"""
if redis.call('GETRANGE', KEYS[2], 0, {NAME_BYTES - 1}) ~= ARGV[1] then return 0 end
redis.call('XTRIM', KEYS[1], 'MINID', ARGV[3])
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[4])
return 1
"""


@dataclass(frozen=True, slots=True)
class SnapshotTiming:
    """When the hotness of a family is summed up, and how much of it."""

    # A snapshot is due after so many keys, and not sooner than this after the last one.
    after_keys: int = 1 << 16
    every_s: float = 30.0
    # The hottest of them stay.
    most_keys: int = 1 << 16
    # Entries stay so long after a snapshot has taken them in; a router that was away for longer begins with the
    # snapshot.
    keep_s: float = 60.0


SNAPSHOTS = SnapshotTiming()


class AccessLog:
    """`follow` until cancelled, then `close`; `record` each request that is placed."""

    def __init__(
        self,
        redis: RedisClient,
        service_id: str,
        index: PrefixIndex,
        settings: IndexSection,
        *,
        router_id: str,
        snapshots: SnapshotTiming = SNAPSHOTS,
        clock: ClusterClock | None = None,
        pause: EasingPause | None = None,
    ) -> None:
        """router_id: another one with each start. clock: learns Redis's time at the start and with each write.
        pause: between polls; it is told of what is recorded and read."""
        self._redis = redis
        self._service_id = service_id
        self._index = index
        self._settings = settings
        self._router_id = router_id
        self._snapshots = snapshots
        self._kept_ms = max(registry.KEPT_MS, round(_KEPT_HALF_LIVES * settings.half_life_s * 1000))
        self._clock = clock or ClusterClock()
        self._buffer: list[Keys] = []
        self._buffered_keys = 0
        self._read_until = [BEGINNING] * registry.FAMILIES
        self._keys_since_snapshot = [0] * registry.FAMILIES
        self._read_at_s: float | None = None
        self._number = 0
        # Entries of ours that were counted here because Redis did not confirm them.
        self._unconfirmed: OrderedDict[int, None] = OrderedDict()
        self._slices = LoopSlices()
        self._pause = pause or EasingPause(settings.refresh_s, settings.max_staleness_s, self._clock.now_s)
        self._loop = RedisLoop(
            self.poll,
            self._pause,
            _WORDS,
            on_outage=self._count_what_waits,
            on_defect=self._count_what_waits,
        )
        # Requests that were not counted because too many waited, and what could not be read.
        self.dropped = 0
        self.damaged = 0

    def record(self, keys: Keys) -> None:
        """A request with these chunks was placed. No I/O."""
        if not len(keys):
            return
        self._pause.came()
        if self._buffered_keys + len(keys) > MOST_BUFFERED_KEYS:
            self.dropped += 1
            return
        self._buffer.append(keys)
        self._buffered_keys += len(keys)

    def now_s(self) -> float:
        """The time on Redis's clock, as far as known, in seconds since 1970: what the index's hotness is asked with."""
        return self._clock.unix_s()

    @property
    def connected(self) -> bool:
        return self._loop.connected

    async def follow(self) -> None:
        await self._loop.run()

    async def close(self) -> None:
        await self._redis.aclose()

    async def poll(self) -> None:
        """Reads what all routers have written and writes what was recorded. Raises one of REDIS_DOWN."""
        if self._read_at_s is None or self._clock.now_s() - self._read_at_s > self._snapshots.keep_s / 2:
            await self._restore()
        await self._read()
        self._read_at_s = self._clock.now_s()
        await self._write()
        for family in range(registry.FAMILIES):
            if self._keys_since_snapshot[family] > self._snapshots.after_keys:
                await self.sum_up(family)

    async def _restore(self) -> None:
        asked_s = self._clock.now_s()
        async with self._redis.pipeline(transaction=False) as pipeline:
            self._ask_time(pipeline)
            for family in range(registry.FAMILIES):
                pipeline.get(registry.hotness_key(self._service_id, family))
            time, *values = await pipeline.execute()
        self._learn_time(time, asked_s)
        for family, value in enumerate(values):
            snapshot = await self._decoded(value)
            if snapshot is None:
                continue
            at_s = min(snapshot.until.at_s, self.now_s())
            for start in range(0, len(snapshot.keys), _KEYS_A_SLICE):
                part = slice(start, start + _KEYS_A_SLICE)
                self._index.restore_hotness(snapshot.keys[part], snapshot.counts[part], at_s)
                await self._slices.rest()
            self._read_until[family] = max(self._read_until[family], snapshot.until)

    async def _read(self) -> None:
        families: Sequence[int] = range(registry.FAMILIES)
        for _ in range(_ROUNDS_A_POLL):
            async with self._redis.pipeline(transaction=False) as pipeline:
                for family in families:
                    key = registry.accesses_key(self._service_id, family)
                    pipeline.xrange(key, str(self._read_until[family].next()), count=_ENTRIES_A_READ)
                pages = await pipeline.execute()
            for family, page in zip(families, pages, strict=True):
                if page:
                    self._pause.came()
                for raw_name, fields in page:
                    await self._count(family, entry_name(raw_name), fields)
            families = [family for family, page in zip(families, pages, strict=True) if len(page) == _ENTRIES_A_READ]
            if not families:
                return

    async def _count(self, family: int, name: EntryName, fields: dict[bytes, bytes]) -> None:
        self._read_until[family] = name
        try:
            batch = wire.AccessBatch.FromString(fields[b"b"])
            if batch.router_id == self._router_id and int(fields[b"n"]) in self._unconfirmed:
                return
            requests = _requests(batch)
        except (DecodeError, KeyError, ValueError) as error:
            logger.error("accesses %s are damaged and left out: %s", name, error)
            self.damaged += 1
            return
        for keys in requests:
            self._keys_since_snapshot[family] += len(keys)
            self._index.accessed(keys, min(name.at_s, self.now_s()))
            await self._slices.rest()

    async def _write(self) -> None:
        """What Redis does not confirm is counted here; nothing is written twice."""
        entries = [(self._next_number(), family, part) for family, part in _entries(self._taken())]
        if not entries:
            return
        asked_s = self._clock.now_s()
        try:
            async with self._redis.pipeline(transaction=False) as pipeline:
                self._ask_time(pipeline)
                for number, family, requests in entries:
                    fields: dict[Any, Any] = {"b": self._encoded(requests), "n": number}
                    key = registry.accesses_key(self._service_id, family)
                    pipeline.xadd(key, fields, maxlen=_MOST_ENTRIES, approximate=True)
                for family in {family for _, family, _ in entries}:
                    pipeline.pexpire(registry.accesses_key(self._service_id, family), self._kept_ms)
                    pipeline.pexpire(registry.hotness_key(self._service_id, family), self._kept_ms)
                time, *answers = await pipeline.execute(raise_on_error=False)
                answers = answers[: len(entries)]
        except REDIS_DOWN:
            await self._not_confirmed(entries)
            raise
        if not isinstance(time, Exception):
            self._learn_time(time, asked_s)
        await self._not_confirmed(
            entry for entry, answer in zip(entries, answers, strict=True) if isinstance(answer, Exception)
        )
        for (_, family, _), answer in zip(entries, answers, strict=True):
            if isinstance(answer, Exception):
                raise answer
            self._written(family, entry_name(answer))

    def _ask_time(self, pipeline: Any) -> None:
        pipeline.eval(SAY_TIME, 1, registry.accesses_key(self._service_id, 0))

    def _learn_time(self, answer: Sequence[bytes], asked_s: float) -> None:
        seconds, microseconds = map(int, answer)
        server_s = seconds + microseconds / 1e6
        self._index.clock_set(self._clock.measured(server_s, asked_s, self._clock.now_s()))

    def _written(self, family: int, name: EntryName) -> None:
        # A Redis that has lost its data and whose clock is behind begins before what was read.
        if name <= self._read_until[family]:
            self._read_until[family] = name.before()

    async def _not_confirmed(self, entries: Iterable[tuple[int, int, list[Keys]]]) -> None:
        for number, _, requests in entries:
            self._unconfirmed[number] = None
            await self._count_alone(requests)
        while len(self._unconfirmed) > _MOST_UNCONFIRMED:
            self._unconfirmed.popitem(last=False)

    async def _count_what_waits(self) -> None:
        await self._count_alone(self._taken())

    async def _count_alone(self, requests: Iterable[Keys]) -> None:
        now = self.now_s()
        for keys in requests:
            self._index.accessed(keys, now)
            await self._slices.rest()

    def _taken(self) -> list[Keys]:
        taken, self._buffer, self._buffered_keys = self._buffer, [], 0
        return taken

    def _next_number(self) -> int:
        self._number += 1
        return self._number

    def _encoded(self, requests: list[Keys]) -> bytes:
        keys = np.concatenate(requests).astype("<u8", copy=False).tobytes()
        return wire.AccessBatch(router_id=self._router_id, keys=keys, lengths=map(len, requests)).SerializeToString()

    async def sum_up(self, family: int) -> None:
        """Writes a snapshot of what this router has read of the family, unless there is a late one."""
        self._keys_since_snapshot[family] = 0
        stream, key = registry.accesses_key(self._service_id, family), registry.hotness_key(self._service_id, family)
        value: Any = await self._redis.get(key)
        base = await self._decoded(value)
        until = self._read_until[family]
        if base is not None and (until <= base.until or self._is_late(base)):
            return
        accesses, until = await self._accesses(stream, base.until if base is not None else BEGINNING, until)
        snapshot = await asyncio.to_thread(
            lambda: encode_snapshot(
                summed_up(base, accesses, until, self._settings.half_life_s, self._snapshots.most_keys)
            )
        )
        oldest = max(0, until.ms - round(self._snapshots.keep_s * 1000))
        before = (value or b"")[:NAME_BYTES]
        await self._redis.eval(WRITE_SNAPSHOT, 2, stream, key, before, snapshot, oldest, self._kept_ms)

    def _is_late(self, snapshot: HotnessSnapshot) -> bool:
        """Of about now. One of a time that is long to come is not: Redis's clock was ahead."""
        return abs(self.now_s() - snapshot.until.at_s) < self._snapshots.every_s

    async def _accesses(self, stream: str, after: EntryName, until: EntryName) -> tuple[list[Access], EntryName]:
        """The entries of a stream between these two, and the last one that was taken."""
        accesses: list[Access] = []
        keys = 0
        while keys < _MOST_SUMMED_KEYS:
            page: Any = await self._redis.xrange(stream, str(after.next()), str(until), count=_ENTRIES_A_READ)
            for raw_name, fields in page:
                after = entry_name(raw_name)
                try:
                    requests = _requests(wire.AccessBatch.FromString(fields[b"b"]))
                except (DecodeError, KeyError, ValueError):
                    continue
                accesses += [Access(request, after.at_s) for request in requests]
                keys += sum(map(len, requests))
            if len(page) < _ENTRIES_A_READ:
                return accesses, until
            await asyncio.sleep(0)
        return accesses, after

    async def _decoded(self, value: Any) -> HotnessSnapshot | None:
        if not isinstance(value, bytes):
            return None
        try:
            return await asyncio.to_thread(decode_snapshot, value)
        except DamagedSnapshotError as error:
            logger.error("a snapshot of hotness is damaged and left out: %s", error)
            self.damaged += 1
            return None


def _entries(requests: Iterable[Keys]) -> list[tuple[int, list[Keys]]]:
    """Requests by family, in entries of a bounded size. A longer request is an entry of its own."""
    entries: list[tuple[int, list[Keys]]] = []
    open_entries: dict[int, tuple[list[Keys], int]] = {}
    for keys in requests:
        family = int(keys[0]) % registry.FAMILIES
        part, size = open_entries.get(family, ([], 0))
        if not part or size + len(keys) > _KEYS_AN_ENTRY:
            part, size = [], 0
            entries.append((family, part))
        part.append(keys)
        open_entries[family] = (part, size + len(keys))
    return entries


def _requests(batch: wire.AccessBatch) -> list[Keys]:
    """Raises ValueError for keys that are not what `lengths` says."""
    keys = np.frombuffer(batch.keys, dtype="<u8")
    if sum(batch.lengths) != len(keys):
        raise ValueError(f"{len(keys)} keys of requests with {sum(batch.lengths)}")
    ends = np.cumsum(batch.lengths)
    # Copied: the index remembers prompts one by one, each would keep the whole entry in memory.
    return [part.copy() for part in np.split(keys, ends[:-1]) if len(part)]
