"""Streams of claims in memory and in a real Redis, with the ways in which they lose things, and a worker that writes.

`Unreliable` stands between the router and either of them.
"""

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import redis
from redis.cluster import RedisCluster

from cluster_wire import registry
from fault_sim.local_redis.client import LocalRedis
from fault_sim.local_redis.store import EntryId, Store
from fault_sim.network import Network
from kv_transfer.claims.claims import ClaimBatch, ClaimChange, ClaimSnapshot, encode_batch, encode_snapshot
from kv_transfer.claims.prefix_chunks import Keys

SERVICE = "svc-test"
_MOST_LATE = 20


def as_keys(keys: Iterable[int]) -> Keys:
    return np.array(sorted(keys), dtype=np.uint64)


class ClaimStreams:
    """Redis as a worker uses it: a real one, or a store in memory. It writes alone.

    client: has the commands of `redis.Redis`.
    """

    def __init__(self, client: "redis.Redis | RedisCluster | Store") -> None:
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
        """The stream ends with that name afterwards, and begins with `oldest`."""
        stream = registry.claims_key(SERVICE, worker_id)
        if self.last_id(worker_id) != name:
            self._redis.xadd(stream, {"b": b""}, id=_id(name))
            self._redis.xdel(stream, _id(name))
        self._redis.xtrim(stream, minid=_id(oldest), approximate=False)
        self._redis.set(registry.snapshot_key(SERVICE, worker_id), data)
        self._redis.delete(registry.resync_key(SERVICE, worker_id))

    def has_snapshot(self, worker_id: str) -> bool:
        return bool(self._redis.exists(registry.snapshot_key(SERVICE, worker_id)))

    def wants_resync(self, worker_id: str) -> bool:
        """A router has asked for a snapshot."""
        return bool(self._redis.exists(registry.resync_key(SERVICE, worker_id)))

    # How it loses things.

    def flush(self) -> None:
        self._redis.flushall()

    def drop(self, worker_id: str, chosen: int, *, damage: bool) -> None:
        """One entry of the stream. A damaged one is not there either: no command writes over an entry."""
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
        """A replica falls behind from now on. Here is none."""

    def fail_over(self) -> None:
        """The replica is the master."""
        self.flush()


class MemoryStreams(ClaimStreams):
    """The same on the in-memory Redis, which has a replica, and whose entries can be damaged."""

    def __init__(self) -> None:
        self.store = Store()
        self._replica: Store | None = None
        super().__init__(self.store)

    def client(self) -> LocalRedis:
        """Of a router, over a link without latency."""
        return LocalRedis(self.store, Network(random.Random(0), latency_s=0.0), "router", timeout_s=1.0)

    def drop(self, worker_id: str, chosen: int, *, damage: bool) -> None:
        stream = self.store.stream(registry.claims_key(SERVICE, worker_id))
        if not damage or stream is None or not stream.entries:
            super().drop(worker_id, chosen, damage=damage)
            return
        _, fields = stream.entries[chosen % len(stream.entries)]
        fields[b"b"] = fields[b"b"][:-3] + b"\xff\xff\xff\xff"

    def fork(self) -> None:
        self._replica = self.store.replica()

    def fail_over(self) -> None:
        if self._replica is not None:
            self.store.fail_over(self._replica)
            self._replica = None


def _id(name: EntryId) -> str:
    return f"{name[0]}-{name[1]}"


class Unreliable:
    """A client whose server may be down, and whose pages of entries may come in any state.

    With `scramble`, some entries are lost, some come twice, some are from earlier pages, in any order.
    broken: by worker what is answered instead of its entries. refusal: what is answered instead of running a script.
    snapshots_read: so many.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self.is_down = False
        # Raised in place of any pipeline.
        self.failure: Exception | None = None
        self.scramble: random.Random | None = None
        self.broken: dict[str, Exception] = {}
        self.refusal: Exception | None = None
        self.snapshots_read = 0
        self._late: dict[str, list[Any]] = {}

    def answer(self, key: str, page: Any) -> Any:
        """What comes of the entries that were read."""
        worker_id = key.partition(f"{{{SERVICE}:")[2].partition("}")[0]
        if worker_id in self.broken:
            return self.broken[worker_id]
        return self._in_disorder(key, page) if isinstance(page, list) else page

    def _in_disorder(self, key: str, page: list[Any]) -> list[Any]:
        late = self._late.setdefault(key, [])
        late[:] = (late + page)[-_MOST_LATE:]
        if (chosen := self.scramble) is None:
            return page
        scrambled = [entry for entry in page for _ in range(chosen.choice((0, 1, 1, 1, 2)))]
        scrambled += chosen.choices(late, k=chosen.randrange(3)) if late else []
        chosen.shuffle(scrambled)
        return scrambled

    def pipeline(self, *, transaction: bool) -> "_UnreliablePipeline":
        assert not transaction, "the keys of several workers lie on several nodes"
        if self.failure is not None:
            raise self.failure
        return _UnreliablePipeline(self, self._client.pipeline(transaction=transaction))

    async def aclose(self) -> None:
        await self._client.aclose()


class _UnreliablePipeline:
    def __init__(self, owner: Unreliable, pipeline: Any) -> None:
        self._owner = owner
        self._pipeline = pipeline
        self._streams: dict[int, str] = {}
        self._scripts: list[int] = []

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
        assert not raise_on_error, "one worker's damaged key would hide the others"
        if self._owner.is_down:
            raise redis.ConnectionError("down")
        answers: list[Any] = await self._pipeline.execute(raise_on_error=raise_on_error)
        for place, key in self._streams.items():
            answers[place] = self._owner.answer(key, answers[place])
        for place in self._scripts if self._owner.refusal is not None else ():
            answers[place] = self._owner.refusal
        return answers

    def get(self, key: str) -> None:
        self._owner.snapshots_read += 1
        self._pipeline.get(key)

    def eval(self, script: str, keys: int, *arguments: Any) -> None:
        self._scripts.append(len(self._pipeline))
        if self._owner.refusal is not None:
            # In its place, so that nothing is written.
            self._pipeline.exists(arguments[0])
        else:
            self._pipeline.eval(script, keys, *arguments)

    def xrange(self, key: str, first: str, *, count: int) -> None:
        self._streams[len(self._pipeline)] = key
        self._pipeline.xrange(key, first, count=count)


class WritingWorker:
    """Writes claims as workers do: behind what it wrote before, or all of them anew as a snapshot."""

    def __init__(self, store: ClaimStreams, worker_id: str, generation: int) -> None:
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
        if is_lost or not self._store.has_snapshot(self.worker_id) or self._store.wants_resync(self.worker_id):
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
