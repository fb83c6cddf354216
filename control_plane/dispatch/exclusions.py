"""Which workers of the pool that is tried a request is kept from, after what went wrong there. Pure.

    excluded     it gets the request no more: any prefill worker that failed, and a decode worker that drains, has died,
                 cannot load the adapter, or hangs
    avoided      it gets the request again where there is no other: a decode worker that was not reached, or whose
                 connection broke before it had begun. Suspects get nothing until they answer, so that one that is the
                 only one of its pool costs a moment. One that was gone back to often enough, and has not begun, is
                 excluded
A decode worker that hangs may only be slow: the next one is left for it again, a few times.
"""

from collections import Counter

from control_plane.dispatch.journey_steps import Excluded, WorkerLost
from control_plane.model.worker_snapshot import WorkerSnapshot

# So often decode workers that hang are gone back to while nothing comes of the request: where machines starve, all are.
MOST_STALLS = 4
# So often one whose connection fails: a worker may answer whoever asks how it is, and not take the request.
MOST_FAILURES = 8


class Exclusions:
    """Of one request."""

    def __init__(self) -> None:
        self._excluded: set[tuple[str, int]] = set()
        self._avoided: set[tuple[str, int]] = set()
        # How often each failed that is avoided.
        self._failures: Counter[tuple[str, int]] = Counter()
        # Of those that were left because they hang, one for each time.
        self._hung: list[tuple[str, int]] = []

    @property
    def excluded(self) -> Excluded:
        return frozenset(self._excluded)

    @property
    def avoided(self) -> Excluded:
        return frozenset(self._avoided)

    @property
    def left_for_good(self) -> Excluded:
        """Those that hang, once they were gone back to often enough."""
        return frozenset(self._hung) if len(self._hung) >= MOST_STALLS else frozenset()

    def begin_anew(self) -> None:
        """With another pool, or another part of the answer."""
        self._excluded.clear()
        self._avoided.clear()
        self._failures.clear()

    def handed_over(self, worker: WorkerSnapshot) -> None:
        """By one that drains: of the others any may get the answer."""
        self.begin_anew()
        self._excluded.add((worker.worker_id, worker.generation))

    def generated(self) -> None:
        """Whoever hangs now does so for the first time."""
        self._hung.clear()

    def prefill_lost(self, worker: WorkerSnapshot) -> None:
        self._excluded.add((worker.worker_id, worker.generation))

    def decode_lost(self, worker: WorkerSnapshot, event: WorkerLost) -> None:
        who = (worker.worker_id, worker.generation)
        if event.was_left or event.has_stalled:
            # It was left for any other that is usable now, whatever was wrong with that one before.
            self.begin_anew()
            self._excluded |= self.left_for_good
        if event.has_stalled:
            self._hung.append(who)
        self._failures[who] += 1
        if event.may_answer_again and self._failures[who] < MOST_FAILURES:
            self._avoided.add(who)
        else:
            self._avoided.discard(who)
            self._excluded.add(who)
