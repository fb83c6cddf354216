"""A placed request on its worker: what it is to that worker, and what counts there until the call has ended.

From `begin` on the worker has its work, its prefix runs there, and it is predicted to lie there; the first two end with
the flight, the prediction ends by itself.
"""

from collections.abc import Callable
from dataclasses import dataclass

from control_plane.fleet.loads import Work
from control_plane.fleet.membership import Member, Membership
from control_plane.model.prefix_scope import PrefixScope
from control_plane.model.worker_snapshot import WorkerSnapshot
from control_plane.placement.running_prefixes import RunningPrefixes
from kv_transfer.claims.prefix_chunks import PackedPrompt


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """A worker for one attempt of a request. work: what it will be to that worker."""

    worker: WorkerSnapshot
    work: Work
    prompt: PackedPrompt
    scope: PrefixScope


class Flight:
    """A request on a worker, from the call to its end. member: None where the worker itself was gone already."""

    def __init__(
        self,
        placement: Placement,
        membership: Membership,
        member: Member | None,
        running: RunningPrefixes,
        now_s: Callable[[], float],
    ) -> None:
        self._placement = placement
        self._membership = membership
        self._member = member
        self._running = running
        self._now_s = now_s
        self._work = placement.work
        self._has_ended = False

    def prefilled(self) -> None:
        """The worker has computed the prompt; a request that comes now does not wait for it."""
        if self._work.expected_s and not self._has_ended:
            self._membership.prefilled(self._member, self._work, self._now_s())
            self._work = self._work.prefilled

    def end(self) -> None:
        """The request has left the worker. A second end changes nothing."""
        if self._has_ended:
            return
        self._has_ended = True
        try:
            self._running.remove(self._placement.worker.worker_id, self._placement.prompt.keys)
        finally:
            self._membership.release(self._member, self._work, self._now_s())
