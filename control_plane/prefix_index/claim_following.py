"""How a router follows what one worker claims of its cached prefixes. Pure: batches and snapshots in, instructions out.

Batches of a generation apply in the order of their sequence. What comes twice, or from an older generation, is left
out; what comes too early is held, up to a bound; a newer generation voids everything the older one claimed.

    following   batches are read from the worker's stream, after `sequence`
    lost        some are missing: the worker's snapshot is to be read
    requested   that snapshot leads nowhere: another one was requested from the worker

The registry is the authority on generations. One that is older than that of the worker's stream is late, and says
nothing; if it stays for `OVERRULED_S`, Redis has lost its data and counts from an earlier clock, and it is the truth.

A snapshot that is not older than what was applied replaces it, and following goes on after it. The stream is the only
memory of what was not applied: a follower reads again from `sequence`, whatever was held or dropped.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from kv_transfer.claims.claims import ClaimBatch, ClaimChange, ClaimSnapshot

# Batches that wait for the ones before them; more are read again later.
MOST_HELD = 64
# A registration that is ahead of the stream for so long announces batches that the stream has lost.
GRACE_S = 1.0
# A registration that is of an older generation for so long is not late.
OVERRULED_S = 5.0
# So many requests without any claim of a block are no accident.
_SILENT_REQUESTS = 3


class Mode(Enum):
    FOLLOWING = "following"
    LOST = "lost"
    REQUESTED = "requested"


@dataclass(frozen=True, slots=True)
class Restart:
    """The worker is of this generation now, and has claimed nothing yet."""

    generation: int


@dataclass(frozen=True, slots=True)
class Apply:
    change: ClaimChange


@dataclass(frozen=True, slots=True)
class Replace:
    """These are all of the worker's claims."""

    snapshot: ClaimSnapshot


Instruction: TypeAlias = Restart | Apply | Replace


@dataclass(slots=True)
class FeedCounts:
    """Of all workers of a router."""

    batches: int = 0
    # In batches that were applied.
    keys: int = 0
    # Batches that were read before, or are of older generations.
    duplicates: int = 0
    # Batches that came before one that they follow.
    held: int = 0
    gaps: int = 0
    # Snapshots taken in.
    resyncs: int = 0
    damaged: int = 0


class WorkerFeed:
    """One worker's claims up to batch `sequence` of `generation`. `mode` says what is to be read next."""

    def __init__(self, counts: FeedCounts) -> None:
        self.generation = 0
        self.sequence = 0
        self.mode = Mode.FOLLOWING
        self._counts = counts
        # The last batch that is known to exist.
        self._last_known = 0
        self._held: dict[int, ClaimChange] = {}
        # The last snapshot taken in: a gap that is still there after it needs another one.
        self._snapshot_sequence = -1
        # Since when the registration has been of an older generation.
        self._older_since_s: float | None = None
        # Since when, and after which batch, there has been nothing to read although there should be.
        self._behind: tuple[float, int] | None = None
        # Until when a request for a snapshot that could not be written counts as made.
        self._refused_until_s = -math.inf

    @property
    def in_sync(self) -> bool:
        """Everything that this worker is known to have claimed has been applied."""
        return self.mode is Mode.FOLLOWING and self.sequence >= self._last_known

    def lag(self, generation: int, claims_sequence: int) -> int:
        """Batches not applied yet, of those known to exist and of those that the registration announces."""
        last = max(self._last_known, claims_sequence) if generation == self.generation else self._last_known
        return max(0, last - self.sequence)

    def registered(self, generation: int, claims_sequence: int, now_s: float) -> list[Instruction]:
        """What the worker's registration says now, on a monotonic clock."""
        if generation > self.generation or self._is_overruled(generation, now_s):
            restart = self._restart(generation)
            if claims_sequence:
                self._last_known = claims_sequence
                self.mode = Mode.LOST
            return restart
        if generation == self.generation:
            self._check_progress(max(self._last_known, claims_sequence), now_s)
        return []

    def batch(self, batch: ClaimBatch) -> list[Instruction]:
        """A batch has been read."""
        if batch.generation < self.generation:
            self._counts.duplicates += 1
            return []
        restart = self._restart_if_newer(batch.generation)
        self._last_known = max(self._last_known, batch.sequence)
        if batch.sequence <= self.sequence:
            self._counts.duplicates += 1
            return restart
        if batch.sequence > self.sequence + 1:
            self._hold(batch)
            self._lose()
            return restart
        self._held[batch.sequence] = batch.change
        return [*restart, *self._applied()]

    def damaged(self, generation: int, sequence: int) -> list[Instruction]:
        """A batch of this name was there and could not be read."""
        self._counts.damaged += 1
        if generation < self.generation:
            return []
        restart = self._restart_if_newer(generation)
        self._last_known = max(self._last_known, sequence)
        if sequence > self.sequence:
            self._lose()
        return restart

    def snapshot(self, snapshot: ClaimSnapshot | None) -> list[Instruction]:
        """The worker's snapshot has been read; None: there is none, or none that can be read."""
        if snapshot is None or not self._leads_on(snapshot):
            if self.mode is Mode.LOST:
                self.mode = Mode.REQUESTED
            return []
        restart = self._restart_if_newer(snapshot.generation)
        self._counts.resyncs += 1
        self.sequence = self._snapshot_sequence = snapshot.sequence
        self._last_known = max(self._last_known, snapshot.sequence)
        self.mode = Mode.FOLLOWING
        return [*restart, Replace(snapshot), *self._applied()]

    def refused(self, until_s: float) -> None:
        """The request for a snapshot could not be written: it is not made again before that time."""
        self._refused_until_s = until_s

    def answered(self, now_s: float) -> None:
        """The request for a snapshot is not there: carried out, forgotten, or refused."""
        if self.mode is Mode.REQUESTED and now_s >= self._refused_until_s:
            self.mode = Mode.LOST

    def check_invariants(self) -> None:
        assert len(self._held) <= MOST_HELD, f"{len(self._held)} batches held"
        assert all(sequence > self.sequence + 1 for sequence in self._held), "a batch is held that can be applied"
        assert self._snapshot_sequence <= self.sequence <= self._last_known, "applied what is not known to exist"

    def _restart_if_newer(self, generation: int) -> list[Instruction]:
        return self._restart(generation) if generation > self.generation else []

    def _restart(self, generation: int) -> list[Instruction]:
        self.generation = generation
        self.sequence = self._last_known = 0
        self.mode = Mode.FOLLOWING
        self._held.clear()
        self._snapshot_sequence = -1
        self._behind = self._older_since_s = None
        self._refused_until_s = -math.inf
        return [Restart(generation)]

    def _is_overruled(self, generation: int, now_s: float) -> bool:
        """Whether the registration has been of an older generation for too long to be late."""
        if generation >= self.generation:
            self._older_since_s = None
            return False
        if self._older_since_s is None:
            self._older_since_s = now_s
        return now_s - self._older_since_s >= OVERRULED_S

    def _leads_on(self, snapshot: ClaimSnapshot) -> bool:
        if snapshot.generation != self.generation:
            return snapshot.generation > self.generation
        return snapshot.sequence >= self.sequence and snapshot.sequence > self._snapshot_sequence

    def _applied(self) -> list[Instruction]:
        """What is held and follows without a gap."""
        instructions: list[Instruction] = []
        for sequence in [each for each in self._held if each <= self.sequence]:
            del self._held[sequence]
        while (change := self._held.pop(self.sequence + 1, None)) is not None:
            self.sequence += 1
            self._counts.batches += 1
            self._counts.keys += len(change)
            instructions.append(Apply(change))
        if self.sequence >= self._last_known:
            self.mode = Mode.FOLLOWING
        return instructions

    def _hold(self, batch: ClaimBatch) -> None:
        if batch.sequence in self._held:
            self._counts.duplicates += 1
            return
        self._counts.held += 1
        if len(self._held) < MOST_HELD:
            self._held[batch.sequence] = batch.change

    def _lose(self) -> None:
        if self.mode is Mode.FOLLOWING:
            self._counts.gaps += 1
            self.mode = Mode.LOST

    def _check_progress(self, last: int, now_s: float) -> None:
        """last: the last batch that the stream or the registration knows of."""
        if last <= self.sequence or self.mode is not Mode.FOLLOWING:
            self._behind = None
        elif self._behind is None or self._behind[1] != self.sequence:
            self._behind = (now_s, self.sequence)
        elif now_s - self._behind[0] >= GRACE_S:
            self._last_known = last
            self._lose()


class SilenceWatch:
    """Whether a worker finishes requests and claims no block: peers' feeds are known to fail just so, without a word.

    Times are monotonic, in seconds.
    """

    def __init__(self, silent_after_s: float) -> None:
        self._silent_after_s = silent_after_s
        self._requests = 0
        self._blocks = 0
        # Requests that have ended since the last claim of a block, and since when there are any.
        self._unanswered = 0
        self._unanswered_since_s = 0.0

    def observe(self, cacheable_requests: int, stored_blocks: int, now_s: float) -> None:
        """What the worker's registration counts now; both start at 0 with each generation."""
        if stored_blocks != self._blocks or cacheable_requests < self._requests:
            self._requests, self._blocks, self._unanswered = cacheable_requests, stored_blocks, 0
        if not self._unanswered:
            self._unanswered_since_s = now_s
        self._unanswered = cacheable_requests - self._requests

    def is_silent(self, now_s: float) -> bool:
        return self._unanswered >= _SILENT_REQUESTS and now_s - self._unanswered_since_s >= self._silent_after_s


def slices(change: ClaimChange, most_keys: int) -> Iterator[ClaimChange]:
    """The change in pieces of so many keys; together, in any order, they are the change."""
    if len(change) <= most_keys:
        yield change
        return
    for name in ("device_removed", "host_removed", "device_stored", "host_stored"):
        keys = getattr(change, name)
        for start in range(0, len(keys), most_keys):
            yield ClaimChange(**{name: keys[start : start + most_keys]})
