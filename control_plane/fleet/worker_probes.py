"""Asks workers whether they are alive: those that are waited for and silent, and those that are suspect.

A worker is alive that answers `GetWorkerStatus` under the generation that it is known by, and whose engine does not
hang in a step by its own account. Redis is not needed for it: a worker that was suspected while the registry is away is
trusted as soon as it answers. One that is not alive is suspect, and calls that wait for it go to another worker, where
there is one. So do answers that a decode worker is generating when it begins to drain.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from rachis.v1 import worker_pb2 as wire

from cluster_core.background import BackgroundTasks
from cluster_core.clock import monotonic_s
from cluster_core.errors import RachisError
from control_plane.fleet.membership import Membership
from control_plane.fleet.vitality import VITALITY_TIMING, Key, Vitality, VitalityTiming
from control_plane.fleet.worker_client import WorkerClient, WorkerLeftError, WorkerLostError, WorkerStalledError
from control_plane.model.worker_snapshot import WorkerSnapshot

logger = logging.getLogger(__name__)

# Answers that leave a draining worker at each look: the others are not to be flooded with their prompts.
_MOVED_AT_ONCE = 16
_DRAINING = wire.WORKER_STATE_DRAINING
# A question that took so many times as long as it was allowed to says that this router is starved, not the worker.
_LATE = 1.25


@dataclass(frozen=True, slots=True, eq=False)
class _Wait:
    # For this reason.
    may_leave: Callable[[WorkerLostError], bool]
    leave: Callable[[WorkerLostError], None]
    # Where the worker drains; None: it is not left for that.
    move: Callable[[WorkerLostError], None] | None


class WorkerProbes:
    """Of one router: `run` until cancelled. changed: notified when a worker is trusted again."""

    def __init__(
        self,
        membership: Membership,
        client: WorkerClient,
        changed: asyncio.Condition,
        timing: VitalityTiming = VITALITY_TIMING,
        now_s: Callable[[], float] = monotonic_s,
    ) -> None:
        self._membership = membership
        self._client = client
        self._changed = changed
        self._timing = timing
        self._now_s = now_s
        self._vitality = Vitality(timing)
        # In the order in which they began: whoever has waited longest goes elsewhere first.
        self._waits: dict[Key, dict[_Wait, None]] = {}
        self._asking = BackgroundTasks()
        # Workers that were found not to be alive, and calls that left them; by counts since the start.
        self.found_lost = 0
        self.left_calls = 0

    @asynccontextmanager
    async def waiting_for(
        self, worker: WorkerSnapshot, may_leave: Callable[[WorkerLostError], bool], *, is_owed: bool = True
    ) -> AsyncIterator[None]:
        """Around the wait for a worker's first message; nothing may be yielded to others within. is_owed: for nothing
        but the worker.

        Raises WorkerStalledError once the worker is found not to be alive, if `may_leave` says then that there is
        somewhere to go.
        """
        reasons: list[WorkerLostError] = []
        try:
            async with asyncio.timeout(None) as bound:

                def leave(why: WorkerLostError) -> None:
                    reasons.append(why)
                    bound.reschedule(asyncio.get_running_loop().time())

                with self.owing(worker, is_owed=is_owed), self.watching(worker, may_leave, leave):
                    yield
            self._vitality.heard(worker, self._now_s())
        except TimeoutError:
            if not bound.expired():
                raise
            raise reasons[0] from None

    @contextmanager
    def owing(self, worker: WorkerSnapshot, *, is_owed: bool = True) -> Iterator[None]:
        """A call waits for the worker. is_owed: for nothing but the worker."""
        self._vitality.waits(worker, self._now_s(), is_owed=is_owed)
        try:
            yield
        finally:
            self._vitality.waited(worker, is_owed=is_owed)

    @contextmanager
    def watching(
        self,
        worker: WorkerSnapshot,
        may_leave: Callable[[WorkerLostError], bool],
        leave: Callable[[WorkerLostError], None],
        *,
        move: Callable[[WorkerLostError], None] | None = None,
    ) -> Iterator[None]:
        """Around a call: `leave` gets the reason once the worker is found not to be alive, `move` once it is found to
        drain, where `may_leave` says that there is somewhere to go. Either is called once, and none after it."""
        key, wait = (worker.worker_id, worker.generation), _Wait(may_leave, leave, move)
        waits = self._waits.setdefault(key, {})
        waits[wait] = None
        try:
            yield
        finally:
            waits.pop(wait, None)
            if not waits and self._waits.get(key) is waits:
                del self._waits[key]

    def heard(self, worker: WorkerSnapshot) -> None:
        """Its engine has sent something."""
        self._vitality.heard(worker, self._now_s())

    def doubtful(self) -> frozenset[Key]:
        """Workers that may hang, as (worker, generation): nobody has found out yet."""
        return self._vitality.doubtful(self._now_s())

    async def run(self) -> None:
        try:
            while True:
                for worker in self._vitality.due(self._membership.suspects(), self._now_s()):
                    self._asking.start(self._ask(worker))
                self._move()
                await asyncio.sleep(self._timing.look_s)
        finally:
            await self._asking.cancel()

    async def _ask(self, worker: WorkerSnapshot) -> None:
        asked_s = self._now_s()
        sentence = await self._complaint(worker)
        now_s = self._now_s()
        if sentence and now_s - asked_s > _LATE * self._timing.answer_s:
            self._vitality.undecided(worker, now_s)
            return
        if not sentence:
            self._vitality.alive(worker, now_s)
            if self._membership.trust(worker):
                logger.warning("%s answers again", worker.worker_id)
                async with self._changed:
                    self._changed.notify_all()
            return
        if self._vitality.lost(worker, now_s):
            logger.warning("%s is not alive: %s", worker.worker_id, sentence)
            self.found_lost += 1
        self._membership.suspect(worker)
        why = WorkerStalledError(f"worker {worker.worker_id}: it hangs")
        leaving = self._taken((worker.worker_id, worker.generation), why, lambda wait: True)
        self.left_calls += len(leaving)
        for wait in leaving:
            wait.leave(why)

    async def _complaint(self, worker: WorkerSnapshot) -> str:
        """Why the worker is not alive; empty where it is."""
        try:
            status = await self._client.status(worker.address, wire.GetWorkerStatusRequest(), self._timing.answer_s)
        except RachisError as error:
            return str(error)
        if status.registration.generation != worker.generation:
            return f"it is generation {status.registration.generation} by now"
        if status.load.stalled_s:
            return f"its engine has been in one step, command or copy for {status.load.stalled_s:.1f} s"
        return ""

    def _move(self) -> None:
        """Answers of draining workers go on elsewhere."""
        for key in list(self._waits):
            member = self._membership.get(key[0])
            registration = member.registration if member is not None else None
            if registration is None or (registration.generation, registration.state) != (key[1], _DRAINING):
                continue
            why = WorkerLeftError(f"worker {key[0]} drains")
            moving = self._taken(key, why, lambda wait: wait.move is not None, at_most=_MOVED_AT_ONCE)
            for wait in moving:
                assert wait.move is not None
                wait.move(why)
            if moving:
                logger.info("%s drains: %d answers go on elsewhere", key[0], len(moving))

    def _taken(
        self, key: Key, why: WorkerLostError, whom: Callable[[_Wait], bool], *, at_most: int | None = None
    ) -> list[_Wait]:
        """Calls at this worker that can go elsewhere, which are watched no more."""
        waits = self._waits.get(key, {})
        leaving = [each for each in waits if whom(each) and each.may_leave(why)][:at_most]
        for wait in leaving:
            waits.pop(wait, None)
        return leaving
