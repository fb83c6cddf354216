"""Reads membership, index and running prefixes into the view that a decision sees. Changes none of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from control_plane.fleet.membership import Membership
from control_plane.model.worker_snapshot import Pool, WorkerSnapshot
from control_plane.placement.index_ports import IndexPorts
from control_plane.placement.running_prefixes import RunningPrefixes
from control_plane.placement.session_work import SessionWork
from control_plane.placement.view import PoolView, unknown_prompt
from kv_transfer.claims.prefix_chunks import Keys


@dataclass(frozen=True, slots=True, eq=False)
class _Slots:
    """Where these workers stand in the index. changes: `PrefixIndex.holder_changes` at that time."""

    workers: Sequence[WorkerSnapshot]
    changes: int
    slots: NDArray[np.int64]


class ViewBuilder:
    def __init__(
        self, membership: Membership, index: IndexPorts, running: RunningPrefixes, *, chunk_tokens: int
    ) -> None:
        self._membership = membership
        self._index = index
        self._running = running
        self._chunk_tokens = chunk_tokens
        # Looked up again only where a worker has come or gone.
        self._slots: dict[Pool, _Slots] = {}

    def view(self, pool: Pool, keys: Keys, now_s: float, *, long_s: float = math.inf, session: SessionWork) -> PoolView:
        """The usable workers of a pool with what they have of a prompt, given by its chunks' keys."""
        candidates = self._membership.candidates(pool, now_s)
        is_stale = self._index.is_stale()
        view = unknown_prompt(pool, candidates, is_stale=is_stale, long_s=long_s, session=session)
        if not is_stale and len(candidates) and len(keys):
            self._fill_in(view, keys, now_s)
        if repeated := self._running.repeated:
            view.repeated[:] = [repeated.get(each.worker_id, 0) * self._chunk_tokens for each in candidates.workers]
        for column in (view.device, view.host, view.shared, view.sharers, view.repeated):
            column.flags.writeable = False
        return view

    def _fill_in(self, view: PoolView, keys: Keys, now_s: float) -> None:
        matches = self._index.index.lookup(keys, now_s)
        slots = self._slots_of(view.pool, view.candidates.workers)
        known = slots >= 0
        view.device[known] = matches.warm[slots[known]] * self._chunk_tokens
        view.host[known] = matches.held[slots[known]] * self._chunk_tokens - view.device[known]
        running = self._running.shared(keys)
        if running:
            for row, worker in enumerate(view.candidates.workers):
                found = running.get(worker.worker_id)
                if found is not None:
                    view.shared[row], view.sharers[row] = found.chunks * self._chunk_tokens, found.requests

    def _slots_of(self, pool: Pool, workers: Sequence[WorkerSnapshot]) -> NDArray[np.int64]:
        """Their places in the index. Claims of another generation say nothing of this one."""
        known = self._slots.get(pool)
        index = self._index.index
        if known is None or known.workers is not workers or known.changes != index.holder_changes:
            slots = np.array([index.slot(each.worker_id, each.generation) for each in workers], dtype=np.int64)
            known = self._slots[pool] = _Slots(workers, index.holder_changes, slots)
        return known.slots
