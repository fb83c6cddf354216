"""Which workers are to be asked whether they are alive, and when. Pure; `worker_probes` asks.

    waited for and silent     calls wait for a worker's first message, and no call has heard of it for `silence_s`: a
                              frozen process, an engine that hangs and a long prefill look alike from here
    doubtful                  calls have waited for a while for its engine, and nothing came, though it answers: it may
                              be in a long step, or hang. Nobody is sent there for a second try
    undecided                 the answer came later than it was waited for because who asked was late: asked again
    suspect                   a call to it has failed, or it did not answer: asked again until it does, after a pause
                              that doubles each time, so that one that answers and fails all the same is trusted rarely
Source of the pauses: exponential back-off, as gRPC's connection back-off has it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from control_plane.model.worker_snapshot import WorkerSnapshot

Key: TypeAlias = tuple[str, int]


@dataclass(frozen=True, slots=True)
class VitalityTiming:
    """Seconds."""

    # How often it is looked who is to be asked.
    look_s: float = 0.1
    silence_s: float = 0.5
    # How long an answer may take.
    answer_s: float = 1.5
    # A worker of which calls wait and nothing has come for so long may well hang, even if it answers.
    doubtful_s: float = 2.0
    # From the suspicion until the worker is asked: at first, and at most.
    first_pause_s: float = 0.25
    longest_pause_s: float = 4.0
    # A worker that has been well for so long is trusted as one that never failed.
    forgive_after_s: float = 60.0


VITALITY_TIMING = VitalityTiming()


@dataclass(slots=True)
class _Watched:
    worker: WorkerSnapshot
    # When it was heard of, or something began to wait for it.
    heard_s: float
    # When something came from its engine, or something began to wait for it.
    worked_s: float
    waiting_calls: int = 0
    # Of these, those whose prompt is whole: sessions wait for their clients, too.
    owed_calls: int = 0
    # An answer is waited for.
    is_asked: bool = False
    # While it is suspect.
    ask_at_s: float | None = None
    pause_s: float = 0.0
    # When it was trusted again.
    well_since_s: float = 0.0


class Vitality:
    """Of the workers that one router has to do with. Times are monotonic seconds."""

    def __init__(self, timing: VitalityTiming = VITALITY_TIMING) -> None:
        self._timing = timing
        self._watched: dict[Key, _Watched] = {}

    def __len__(self) -> int:
        """Workers that something is remembered of."""
        return len(self._watched)

    def waits(self, worker: WorkerSnapshot, now_s: float, *, is_owed: bool = True) -> None:
        """A call waits for the worker's first message, until `waited`. is_owed: for nothing but the worker."""
        watched = self._of(worker, now_s)
        if not watched.waiting_calls:
            watched.heard_s = now_s
        if not watched.owed_calls:
            watched.worked_s = now_s
        watched.waiting_calls += 1
        watched.owed_calls += is_owed

    def waited(self, worker: WorkerSnapshot, *, is_owed: bool = True) -> None:
        watched = self._watched[_key(worker)]
        watched.waiting_calls -= 1
        watched.owed_calls -= is_owed

    def heard(self, worker: WorkerSnapshot, now_s: float) -> None:
        """Something has come from the worker's engine."""
        watched = self._watched.get(_key(worker))
        if watched is not None:
            watched.heard_s = watched.worked_s = now_s

    def doubtful(self, now_s: float) -> frozenset[Key]:
        """Workers for whose engines calls have waited for a while, and nothing has come: nothing for a second try."""
        return frozenset(
            key
            for key, watched in self._watched.items()
            if watched.owed_calls and now_s - watched.worked_s >= self._timing.doubtful_s
        )

    def due(self, suspects: Iterable[WorkerSnapshot], now_s: float) -> list[WorkerSnapshot]:
        """Those that are to be asked now; each counts as asked until `alive` or `lost`. suspects: all that are."""
        timing = self._timing
        suspected = {_key(worker): worker for worker in suspects}
        for worker in suspected.values():
            watched = self._of(worker, now_s)
            if watched.ask_at_s is None:
                if now_s - watched.well_since_s >= timing.forgive_after_s:
                    watched.pause_s = 0.0
                self._ask_later(watched, now_s)
        for key in [key for key, each in self._watched.items() if self._is_forgotten(each, key in suspected, now_s)]:
            del self._watched[key]
        due = []
        for watched in self._watched.values():
            if watched.is_asked:
                continue
            if watched.ask_at_s is not None:
                # Also of one that calls still wait for while it has left the registry.
                is_due = now_s >= watched.ask_at_s
            else:
                is_due = watched.waiting_calls > 0 and now_s - watched.heard_s >= timing.silence_s
            if is_due:
                watched.is_asked = True
                due.append(watched.worker)
        return due

    def alive(self, worker: WorkerSnapshot, now_s: float) -> None:
        """The worker has answered, and its engine works."""
        watched = self._of(worker, now_s)
        if watched.ask_at_s is not None:
            watched.well_since_s = now_s
        watched.is_asked, watched.ask_at_s, watched.heard_s = False, None, now_s

    def undecided(self, worker: WorkerSnapshot, now_s: float) -> None:
        """The question was not answered, for reasons that are not the worker's: it is asked again."""
        watched = self._of(worker, now_s)
        watched.is_asked, watched.heard_s = False, now_s
        if watched.ask_at_s is not None:
            watched.ask_at_s = now_s + watched.pause_s

    def lost(self, worker: WorkerSnapshot, now_s: float) -> bool:
        """The worker has not answered, or its engine hangs: it is suspect from now on. True where it was not before."""
        watched = self._of(worker, now_s)
        was_suspect = watched.ask_at_s is not None
        watched.is_asked = False
        self._ask_later(watched, now_s)
        return not was_suspect

    def _ask_later(self, watched: _Watched, now_s: float) -> None:
        timing = self._timing
        watched.pause_s = min(max(2 * watched.pause_s, timing.first_pause_s), timing.longest_pause_s)
        watched.ask_at_s = now_s + watched.pause_s

    def _of(self, worker: WorkerSnapshot, now_s: float) -> _Watched:
        watched = self._watched.get(_key(worker))
        if watched is None:
            watched = self._watched[_key(worker)] = _Watched(
                worker, now_s, now_s, well_since_s=-self._timing.forgive_after_s
            )
        return watched

    def _is_forgotten(self, watched: _Watched, is_suspect: bool, now_s: float) -> bool:
        is_well = now_s - watched.well_since_s >= self._timing.forgive_after_s
        return not (watched.waiting_calls or watched.is_asked or is_suspect) and is_well


def _key(worker: WorkerSnapshot) -> Key:
    return worker.worker_id, worker.generation
