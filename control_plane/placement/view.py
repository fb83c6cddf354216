"""What a decision of placement sees, frozen: a pool's workers at one moment, and what each has of one prompt."""

import math
from dataclasses import dataclass

import numpy as np
from rachis.v1 import worker_pb2 as wire

from control_plane.fleet.candidates import Candidates
from control_plane.fleet.loads import Floats
from control_plane.model.worker_snapshot import Pool
from control_plane.placement.session_work import SessionWork

_UNKNOWN = SessionWork()


@dataclass(frozen=True, slots=True, eq=False)
class PoolView:
    """One pool as one prompt finds it. Columns have a row for each candidate and count tokens of the prompt."""

    pool: Pool
    candidates: Candidates
    # Of the prompt's beginning: what lies on the device, or is predicted to.
    device: Floats
    # What follows that in host memory.
    host: Floats
    # What the prompt has in common with requests that run or wait there, as far as this router knows; with how many.
    shared: Floats
    sharers: Floats
    # Of the tokens in flight there, what several of this router's requests have in common, but for the first of them:
    # it lies in memory once.
    repeated: Floats
    # The index is too old to be believed: load alone decides.
    is_stale: bool = False
    # Seconds of engine time above which a prefill is long: see `long_prompts`.
    long_s: float = math.inf
    # What a session counts for that is open.
    session: SessionWork = _UNKNOWN

    @property
    def does_both(self) -> bool:
        """These workers prefill and decode."""
        return any(each.pool == wire.POOL_SHARED for each in self.candidates.workers)

    def occupied_tokens(self, workers: Candidates | None = None) -> Floats:
        """Of each worker's KV, what the requests in flight take. workers: with those alone that have a place before a
        request (`Candidates.before`); what the others have in common may be all that is repeated."""
        in_flight = self.candidates.in_flight_tokens
        left = in_flight if workers is None else workers.in_flight_tokens
        repeated = np.maximum(self.repeated - (in_flight - left), 0.0)
        occupied: Floats = np.maximum(left - repeated, 0.0)
        return occupied

    @property
    def running_tokens(self) -> Floats:
        """Of the prompt, what lies in memory for requests that run. What is shared is known at some depths only, each
        up to half as deep again as the one before (`running_prefixes`): between them the cache tells."""
        running: Floats = np.maximum(self.shared, np.minimum(self.device, 1.5 * self.shared))
        return running

    def uncached(self, prompt_tokens: int) -> Floats:
        """Prompt tokens that would have to be computed; at least the last one always is."""
        return np.maximum(prompt_tokens - self.device - self.host, 1.0)


def unknown_prompt(
    pool: Pool,
    candidates: Candidates,
    *,
    is_stale: bool = False,
    long_s: float = math.inf,
    session: SessionWork = _UNKNOWN,
) -> PoolView:
    """A pool in which nobody has anything of the prompt."""
    device, host, shared, sharers, repeated = np.zeros((5, len(candidates)))
    return PoolView(pool, candidates, device, host, shared, sharers, repeated, is_stale, long_s, session)
