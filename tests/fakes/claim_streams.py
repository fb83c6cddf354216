"""Streams of claims in memory and in a real Redis, with the ways in which they lose things, and a worker that writes.

`StreamStore` is what both offer to the worker; what the router calls of its client is in `MemoryStreams.pipeline`.
`Unreliable` stands between the router and either of them.
"""

import random
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import redis
from rachis import registry
from redis.cluster import RedisCluster

from kv_transfer.claims.claims import ClaimBatch, ClaimChange, ClaimSnapshot, encode_batch, encode_snapshot
from kv_transfer.claims.prefix_chunks import Keys

SERVICE = "svc-test"
EntryId = tuple[int, int]
_MOST_LATE = 20


def as_keys(keys: Iterable[int]) -> Keys:
    return np.array(sorted(keys), dtype=np.uint64)


class StreamStore(Protocol):
    """Redis as a worker uses it; every call is atomic."""

    def last_id(self, worker_id: str) -> EntryId | None: ...
    def append(self, worker_id: str, name: EntryId, data: bytes) -> None: ...
    def put_snapshot(self, worker_id: str, name: EntryId, data: bytes, oldest: EntryId) -> None: ...
    def has_snapshot(self, worker_id: str) -> bool: ...
    def is_asked(self, worker_id: str) -> bool: ...
    def flush(self) -> None: ...
    def drop(self, worker_id: str, chosen: int, *, damage: bool) -> None: ...
    def drop_snapshot(self, worker_id: str, *, damage: bool) -> None: ...
    def fork(self) -> None: ...
    def fail_over(self) -> None: ...


@dataclass
class _Stream:
    entries: list[tuple[EntryId, bytes]] = field(default_factory=list)
    last: EntryId | None = None
    snapshot: bytes | None = None
    asked: bool = False


class MemoryStreams:
    """A dictionary of streams. `fork` is a replica that falls behind from then on, `fail_over` makes it the master.

    broken: by worker what is answered instead of its entries.
    """

    def __init__(self) -> None:
        self.streams: dict[str, _Stream] = {}
        self.broken: dict[str, Exception] = {}
        self._replica: dict[str, _Stream] | None = None

    def of(self, worker_id: str) -> _Stream:
        return self.streams.setdefault(worker_id, _Stream())

    def last_id(self, worker_id: str) -> EntryId | None:
        return self.of(worker_id).last

    def append(self, worker_id: str, name: EntryId, data: bytes) -> None:
        stream = self.of(worker_id)
        assert stream.last is None or name > stream.last
        stream.entries.append((name, data))
        stream.last = name

    def put_snapshot(self, worker_id: str, name: EntryId, data: bytes, oldest: EntryId) -> None:
        stream = self.of(worker_id)
        stream.entries = [entry for entry in stream.entries if entry[0] >= oldest]
        stream.last, stream.snapshot, stream.asked = name, data, False

    def has_snapshot(self, worker_id: str) -> bool:
        return self.of(worker_id).snapshot is not None

    def is_asked(self, worker_id: str) -> bool:
        return self.of(worker_id).asked

    def flush(self) -> None:
        self.streams.clear()

    def drop(self, worker_id: str, chosen: int, *, damage: bool) -> None:
        entries = self.of(worker_id).entries
        if entries:
            name, data = entries.pop(chosen % len(entries))
            if damage:
                entries.append((name, data[:-3] + b"\xff\xff\xff\xff"))
                entries.sort()

    def drop_snapshot(self, worker_id: str, *, damage: bool) -> None:
        self.of(worker_id).snapshot = b"\x01junk" if damage else None

    def fork(self) -> None:
        self._replica = deepcopy(self.streams)

    def fail_over(self) -> None:
        if self._replica is not None:
            self.streams, self._replica = self._replica, None

    def pipeline(self, *, transaction: bool) -> "_MemoryPipeline":
        assert not transaction, "the keys of several workers lie on several nodes"
        return _MemoryPipeline(self)

    async def aclose(self) -> None:
        pass


class _MemoryPipeline:
    """The commands of the router, on the streams."""

    def __init__(self, store: MemoryStreams) -> None:
        self._store = store
        self._answers: list[Any] = []

    def __len__(self) -> int:
        return len(self._answers)

    async def __aenter__(self) -> "_MemoryPipeline":
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def xrange(self, key: str, first: str, *, count: int) -> None:
        generation, sequence = map(int, first.split("-"))
        entries = self._stream(key).entries
        page = [(name, data) for name, data in entries if name >= (generation, sequence)][:count]
        if (error := self._store.broken.get(self._worker_id(key))) is not None:
            self._answers.append(error)
            return
        self._answers.append([(_id(name).encode(), {b"b": data}) for name, data in page])

    def get(self, key: str) -> None:
        self._answers.append(self._stream(key).snapshot)

    def exists(self, key: str) -> None:
        self._answers.append(int(self._stream(key).asked))

    def set(self, key: str, _: int, *, ex: int) -> None:
        assert ex > 0
        self._stream(key).asked = True
        self._answers.append(True)

    async def execute(self, *, raise_on_error: bool) -> list[Any]:
        assert not raise_on_error, "one worker's damaged key would hide the others"
        return self._answers

    def _stream(self, key: str) -> _Stream:
        return self._store.of(self._worker_id(key))

    @staticmethod
    def _worker_id(key: str) -> str:
        return key.partition(f"{{{SERVICE}:")[2].partition("}")[0]


class RedisStreams:
    """The same in a real Redis, for one that writes alone. A damaged entry is one that is not there."""

    def __init__(self, client: "redis.Redis | RedisCluster") -> None:
        self._redis: Any = client

    def last_id(self, worker_id: str) -> EntryId | None:
        try:
            name = self._redis.xinfo_stream(registry.claims_key(SERVICE, worker_id))["last-generated-id"]
        except redis.ResponseError:
            return None
        generation, sequence = name.split(b"-")
        return int(generation), int(sequence)

    def append(self, worker_id: str, name: EntryId, data: bytes) -> None:
        self._redis.xadd(registry.claims_key(SERVICE, worker_id), {"b": data}, id=_id(name))

    def put_snapshot(self, worker_id: str, name: EntryId, data: bytes, oldest: EntryId) -> None:
        stream = registry.claims_key(SERVICE, worker_id)
        if self.last_id(worker_id) != name:
            self._redis.xadd(stream, {"b": b""}, id=_id(name))
            self._redis.xtrim(stream, maxlen=0, approximate=False)
        self._redis.xtrim(stream, minid=_id(oldest), approximate=False)
        self._redis.set(registry.snapshot_key(SERVICE, worker_id), data)
        self._redis.delete(registry.resync_key(SERVICE, worker_id))

    def has_snapshot(self, worker_id: str) -> bool:
        return bool(self._redis.exists(registry.snapshot_key(SERVICE, worker_id)))

    def is_asked(self, worker_id: str) -> bool:
        return bool(self._redis.exists(registry.resync_key(SERVICE, worker_id)))

    def flush(self) -> None:
        self._redis.flushall()

    def drop(self, worker_id: str, chosen: int, *, damage: bool) -> None:
        stream = registry.claims_key(SERVICE, worker_id)
        names = [name for name, _ in self._redis.xrange(stream)]
        if names:
            self._redis.xdel(stream, names[chosen % len(names)])

    def drop_snapshot(self, worker_id: str, *, damage: bool) -> None:
        key = registry.snapshot_key(SERVICE, worker_id)
        if damage:
            self._redis.set(key, b"\x01junk")
        else:
            self._redis.delete(key)

    def fork(self) -> None:
        """There is no replica."""

    def fail_over(self) -> None:
        self.flush()


def _id(name: EntryId) -> str:
    return f"{name[0]}-{name[1]}"


class Unreliable:
    """A client whose server may be down, and whose pages of entries may come in any state.

    With `scramble`, some entries are lost, some come twice, some are from earlier pages, in any order.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self.is_down = False
        self.scramble: random.Random | None = None
        self._late: dict[str, list[Any]] = {}

    def in_disorder(self, key: str, page: list[Any]) -> list[Any]:
        late = self._late.setdefault(key, [])
        late[:] = (late + page)[-_MOST_LATE:]
        if (chosen := self.scramble) is None:
            return page
        scrambled = [entry for entry in page for _ in range(chosen.choice((0, 1, 1, 1, 2)))]
        scrambled += chosen.choices(late, k=chosen.randrange(3)) if late else []
        chosen.shuffle(scrambled)
        return scrambled

    def pipeline(self, *, transaction: bool) -> "_UnreliablePipeline":
        return _UnreliablePipeline(self, self._client.pipeline(transaction=transaction))

    async def aclose(self) -> None:
        await self._client.aclose()


class _UnreliablePipeline:
    def __init__(self, owner: Unreliable, pipeline: Any) -> None:
        self._owner = owner
        self._pipeline = pipeline
        self._streams: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._pipeline)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipeline, name)

    async def __aenter__(self) -> "_UnreliablePipeline":
        await self._pipeline.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._pipeline.__aexit__(*error)

    async def execute(self, *, raise_on_error: bool) -> list[Any]:
        if self._owner.is_down:
            raise redis.ConnectionError("down")
        answers: list[Any] = await self._pipeline.execute(raise_on_error=raise_on_error)
        for place, key in self._streams.items():
            if isinstance(answers[place], list):
                answers[place] = self._owner.in_disorder(key, answers[place])
        return answers

    def xrange(self, key: str, first: str, *, count: int) -> None:
        self._streams[len(self._pipeline)] = key
        self._pipeline.xrange(key, first, count=count)


class WritingWorker:
    """Writes claims as workers do: behind what it wrote before, or all of them anew as a snapshot."""

    def __init__(self, store: StreamStore, worker_id: str, generation: int) -> None:
        self.worker_id = worker_id
        self.generation = generation
        self.claims: tuple[set[int], set[int]] = (set(), set())
        self.sequence = 0
        self.is_superseded = False
        self._store = store
        self._pending: dict[tuple[int, int], bool] = {}
        self._last_used = 0
        self._snapshot_sequence = 0
        self._write_snapshot(0)

    @property
    def has_written_all(self) -> bool:
        return not self._pending

    def change(self, tier: int, keys: Iterable[int]) -> None:
        """Those that were claimed are no more, and the other way round."""
        for key in keys:
            self.claims[tier].symmetric_difference_update({key})
            self._pending[tier, key] = key in self.claims[tier]

    def write(self, *, answer_is_lost: bool = False) -> None:
        """What has changed. A lost answer: it was written, and the worker does not hear so."""
        if not self._pending or not self._may_write():
            return
        if self._store.last_id(self.worker_id) != (self.generation, self.sequence):
            self.write_snapshot()
            return
        self._last_used += 1
        batch = ClaimBatch(self.generation, self._last_used, self._change())
        self._store.append(self.worker_id, (self.generation, self._last_used), encode_batch(batch))
        if not answer_is_lost:
            self.sequence = self._last_used
            self._pending.clear()

    def write_snapshot(self) -> None:
        if self._may_write():
            self._last_used += 1
            self._write_snapshot(self._last_used)

    def look(self) -> None:
        """What a worker does when it has nothing to do."""
        is_lost = self._store.last_id(self.worker_id) != (self.generation, self.sequence)
        if is_lost or not self._store.has_snapshot(self.worker_id) or self._store.is_asked(self.worker_id):
            self.write_snapshot()

    def _may_write(self) -> bool:
        last = self._store.last_id(self.worker_id)
        self.is_superseded |= last is not None and last[0] > self.generation
        return not self.is_superseded

    def _write_snapshot(self, sequence: int) -> None:
        snapshot = ClaimSnapshot(self.generation, sequence, *map(as_keys, self.claims))
        oldest = (self.generation, self._snapshot_sequence + 1)
        is_known = self._store.last_id(self.worker_id) == (self.generation, self.sequence)
        self._store.put_snapshot(
            self.worker_id,
            (self.generation, sequence),
            encode_snapshot(snapshot),
            oldest if is_known else (self.generation, sequence + 1),
        )
        self.sequence = self._snapshot_sequence = sequence
        self._pending.clear()

    def _change(self) -> ClaimChange:
        states = self._pending.items()
        return ClaimChange(
            *(
                as_keys(key for (of_tier, key), is_claimed in states if of_tier == tier and is_claimed is comes)
                for tier in (0, 1)
                for comes in (True, False)
            )
        )
