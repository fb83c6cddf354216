"""A worker's claims on their way to Redis: batches in a stream, snapshots beside it; see `cluster_wire.registry`.

Every batch has the next number of the worker's generation, and generation and number are the entry's id. Redis takes
a batch only behind the one that was written before it, so that nothing is written twice, out of order, or for a worker
whose id another one has taken over (a newer generation: this one falls silent for good). Where the stream does not end
with what was written, because Redis has lost its data, all claims are written anew, as a snapshot with a number of its
own. While Redis does not answer, changes are merged behind the batches that were on their way: of a chunk only its last
state counts. What waits to be written is never more than what is claimed, plus `slack_keys`: beyond that a snapshot is
shorter.

Keys that are no longer written expire.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import numpy as np

from cluster_configs.schema import IndexSection
from cluster_core.clock import monotonic_s
from cluster_core.engine_reports import PrefixClaimChange, PrefixClaims
from cluster_core.errors import StartError, UnavailableError
from cluster_wire import registry
from cluster_wire.redis_client import RedisClient
from cluster_wire.redis_loop import LoopWords, RedisLoop
from kv_transfer.blocks import Tier
from kv_transfer.claims.claims import ClaimBatch, ClaimChange, ClaimSnapshot, encode_batch, encode_snapshot
from kv_transfer.claims.prefix_chunks import Keys
from worker_runtime.claim_scripts import CHECK, SNAPSHOT, WRITE

logger = logging.getLogger(__name__)

BATCH_FIELD = "b"
_MOST_BATCH_KEYS = 8192
_MOST_CALL_BATCHES = 16
# So long after the last check the keys expire; a successor that starts earlier finds them, and writes over them.
_KEEP_MS = 600_000


@dataclass(frozen=True, slots=True)
class FeedTiming:
    """What of the feed is not configured; tests have other values."""

    # Changes that may wait on top of what is claimed.
    slack_keys: int = 65_536
    # How often the keys' expiry is renewed, and it is looked up what has become of them and whether anybody wants a
    # snapshot.
    check_s: float = 0.5
    # After Redis did not answer.
    retry_s: float = 0.25


FEED_TIMING = FeedTiming()


class ClaimSource(Protocol):
    """What of `cluster_core.engine.Engine` the feed asks."""

    async def prefix_claims(self, on_look: Callable[[], None] = ...) -> PrefixClaims: ...


class ClaimAudit(Protocol):
    """What a worker's service asks of the feed."""

    async def audit(self, engine: ClaimSource) -> tuple[int, PrefixClaims]: ...


@dataclass(slots=True)
class FeedCounters:
    """Since the start. losses: the stream was not as it was left, or too much waited. outages: Redis did not answer."""

    batches: int = 0
    keys: int = 0
    snapshots: int = 0
    losses: int = 0
    outages: int = 0
    superseded: int = 0


@dataclass(frozen=True, slots=True)
class _Sealed:
    """A batch with a number, which changes no more."""

    sequence: int
    keys: int
    encoded: bytes


class ClaimFeed:
    """One generation of one worker. `changed` at any time; `open` once, then `keep` until cancelled, then `close`.

    sequence: number of the last batch that is known to be written. stored_blocks: what `count_stored_blocks` gave, the
    engine's count, when what is written by now was taken. timeout_s: longest that Redis is waited for. on_superseded:
    another worker has taken over the id.
    """

    def __init__(
        self,
        redis: RedisClient,
        service_id: str,
        worker_id: str,
        generation: int,
        index: IndexSection,
        *,
        on_superseded: Callable[[], None] = lambda: None,
        count_stored_blocks: Callable[[], int] = lambda: 0,
        timing: FeedTiming = FEED_TIMING,
    ) -> None:
        self.sequence = 0
        self.stored_blocks = 0
        self.counters = FeedCounters()
        self._redis = redis
        self._write, self._snapshot, self._check = map(self._redis.register_script, (WRITE, SNAPSHOT, CHECK))
        self._keys = [
            key(service_id, worker_id) for key in (registry.claims_key, registry.snapshot_key, registry.resync_key)
        ]
        self._worker_id = worker_id
        self._generation = generation
        self._index = index
        self._on_superseded = on_superseded
        self._count_stored_blocks = count_stored_blocks
        self._timing = timing
        # By tier: what is claimed, and what of it has changed since the last seal.
        self._claims: tuple[set[int], set[int]] = (set(), set())
        self._pending: tuple[dict[int, bool], dict[int, bool]] = ({}, {})
        self._sealed: list[_Sealed] = []
        self._last_sealed = 0
        self._something_changed = asyncio.Event()
        self._is_lost = self._resync = False
        self._has_ended = False
        # Since the last snapshot, and where the stream begins that was kept with it.
        self._keys_since = 0
        self._snapshot_sequence = 0
        self._next_check_s = 0.0
        words = LoopWords(
            logger,
            away=f"claims of {worker_id} cannot be written, they are kept: %s",
            back=f"claims of {worker_id} are written again",
            defect=f"claims of {worker_id} cannot be written for a defect",
        )
        self._loop = RedisLoop(
            self.exchange,
            self._until_due,
            words,
            on_outage=self._note_outage,
            on_defect=self._write_anew,
            goes_on=lambda: not self.is_superseded,
        )

    @property
    def is_superseded(self) -> bool:
        return self.counters.superseded > 0

    @property
    def claims_sequence(self) -> int:
        """For the registration: a feed that writes no more owes a batch, so that nobody believes to be in sync."""
        return self.sequence + (self._loop.has_defect or self._has_ended)

    def changed(self, change: PrefixClaimChange) -> None:
        """The engine's claims have changed. On the loop."""
        if self.is_superseded:
            return
        for tier, states in ((Tier.DEVICE, change.device), (Tier.HOST, change.host)):
            claims = self._claims[tier]
            for key, is_claimed in states.items():
                (claims.add if is_claimed else claims.discard)(key)
            if not self._is_lost:
                self._pending[tier].update(states)
        if self.waiting_keys() > sum(map(len, self._claims)) + self._timing.slack_keys:
            self._lose("more changes wait than there are claims")
        self._something_changed.set()

    async def audit(self, engine: ClaimSource) -> tuple[int, PrefixClaims]:
        """What the engine's pools hold, and the number of the batch after which followers have to believe just that.

        Raises UnavailableError where no batch says it: all claims are about to be written anew, or never again.
        """
        sequence = 0

        def seal() -> None:
            nonlocal sequence
            sequence = -1 if self._is_lost or self.is_superseded else self._seal()

        claims = await engine.prefix_claims(seal)
        if sequence < 0:
            raise UnavailableError(f"the claims of {self._worker_id} are not in its stream")
        return sequence, claims

    async def open(self) -> None:
        """Voids what earlier generations have claimed. Raises one of REDIS_DOWN, StartError for a newer generation."""
        snapshot = _encoded_snapshot(self._generation, 0, [[], []])
        args = (self._generation, self._id(0), _KEEP_MS, snapshot, self._id(0))
        if await self._snapshot(keys=self._keys, args=args) != b"ok":
            raise StartError(f"a newer worker goes by the name {self._worker_id}")

    async def keep(self) -> None:
        """Writes what has changed until cancelled or superseded; an outage of Redis is logged once and outlived.

        So is whatever else fails: all claims are written anew then.
        """
        try:
            await self._loop.run()
        finally:
            self._has_ended = True

    async def _note_outage(self) -> None:
        self.counters.outages += self._loop.connected

    async def _write_anew(self) -> None:
        self._lose("what was written of them last is not known")

    async def _until_due(self) -> None:
        """Until there is something to write, a check is due, or it may be tried again."""
        if not self._loop.is_well:
            await asyncio.sleep(self._timing.retry_s)
            return
        await asyncio.sleep(self._index.write_interval_s)
        if not self._is_lost and not self._resync:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, self._next_check_s - monotonic_s())):
                    await self._something_changed.wait()

    async def close(self) -> None:
        """What is written stays, until a successor voids it or it expires."""
        await self._redis.aclose()

    def waiting_keys(self) -> int:
        """Changes that are not known to be written."""
        return sum(map(len, self._pending)) + sum(each.keys for each in self._sealed)

    def _seal(self) -> int:
        """What has changed by now becomes batches. Returns the number of the last one."""
        device, host = ([(key, state) for key, state in pending.items()] for pending in self._pending)
        for pending in self._pending:
            pending.clear()
        changes = iter([(Tier.DEVICE, *each) for each in device] + [(Tier.HOST, *each) for each in host])
        while part := list(islice(changes, _MOST_BATCH_KEYS)):
            columns = [
                _keys(key for tier, key, is_claimed in part if tier is of_tier and is_claimed is comes)
                for of_tier in (Tier.DEVICE, Tier.HOST)
                for comes in (True, False)
            ]
            self._last_sealed += 1
            batch = ClaimBatch(self._generation, self._last_sealed, ClaimChange(*columns))
            self._sealed.append(_Sealed(self._last_sealed, len(part), encode_batch(batch)))
        return self._last_sealed

    async def exchange(self) -> None:
        """Writes what has changed by now, and a snapshot of just that where one is due. Raises one of REDIS_DOWN."""
        # What has a number already goes first: what has changed since is merged until that is written.
        if self._sealed and not self._is_lost and not await self._write_sealed(self._last_sealed):
            return
        self._something_changed.clear()
        stored_blocks = self._count_stored_blocks()
        claims: list[list[int]] | None = None
        if self._is_lost:
            self._drop_changes()
            self._last_sealed += 1
        else:
            self._seal()
        last = self._last_sealed
        if self._is_lost or self._resync or self._keys_since > self._index.snapshot_keys:
            claims = [list(each) for each in self._claims]
        anew, self._is_lost = self._is_lost, False
        try:
            if not anew and not await self._write_sealed(last):
                return
            if claims is not None and not await self._write_snapshot(last, claims):
                return
        except BaseException:
            self._is_lost |= anew
            raise
        self.stored_blocks = stored_blocks
        if monotonic_s() >= self._next_check_s and last == self.sequence:
            answer = await self._check(keys=self._keys, args=(self._generation, self._id(self.sequence), _KEEP_MS))
            self._next_check_s = monotonic_s() + self._timing.check_s
            self._resync = answer == b"resync"
            self._heed(answer)

    async def _write_sealed(self, last: int) -> bool:
        """Whether all batches up to that one are written."""
        while part := [each for each in self._sealed[:_MOST_CALL_BATCHES] if each.sequence <= last]:
            entries = [item for each in part for item in (self._id(each.sequence), each.encoded)]
            args = (self._generation, self._id(self.sequence), _KEEP_MS, *entries)
            if not self._heed(await self._write(keys=self._keys[:1], args=args)):
                return False
            self.sequence = part[-1].sequence
            del self._sealed[: len(part)]
            keys = sum(each.keys for each in part)
            self._keys_since += keys
            self.counters.keys += keys
            self.counters.batches += len(part)
        return True

    async def _write_snapshot(self, sequence: int, claims: list[list[int]]) -> bool:
        """Whether the claims after that batch are written. The claims are the call's own: a thread reads them.

        The stream keeps what was written since the snapshot before: who is a little behind needs no snapshot.
        """
        snapshot = await asyncio.to_thread(_encoded_snapshot, self._generation, sequence, claims)
        oldest = self._id(self._snapshot_sequence + 1)
        args = (self._generation, self._id(sequence), _KEEP_MS, snapshot, oldest)
        if not self._heed(await self._snapshot(keys=self._keys, args=args)):
            return False
        self.sequence = self._snapshot_sequence = sequence
        self._keys_since = 0
        self._resync = False
        self.counters.snapshots += 1
        return True

    def _heed(self, answer: bytes) -> bool:
        """Whether Redis has done what it was asked to."""
        if answer == b"superseded" and not self.is_superseded:
            self.counters.superseded += 1
            logger.error("another worker has taken over the id %s: this one claims nothing any more", self._worker_id)
            self._drop_changes()
            for claims in self._claims:
                claims.clear()
            self._on_superseded()
        elif answer == b"lost":
            self._lose("its stream is not as it was left")
        return answer in (b"ok", b"resync")

    def _lose(self, why: str) -> None:
        if not self._is_lost:
            self.counters.losses += 1
            logger.warning("all claims of %s are written anew: %s", self._worker_id, why)
        self._is_lost = True
        self._drop_changes()

    def _drop_changes(self) -> None:
        self._sealed.clear()
        for pending in self._pending:
            pending.clear()

    def _id(self, sequence: int) -> str:
        return f"{self._generation}-{sequence}"


def _encoded_snapshot(generation: int, sequence: int, claims: list[list[int]]) -> bytes:
    return encode_snapshot(ClaimSnapshot(generation, sequence, *map(_keys, claims)))


def _keys(keys: Iterable[int] | Sequence[int]) -> Keys:
    return np.fromiter(keys, dtype=np.uint64)
