"""Requests during which engines have died, by what they ask for, for a while. Pure.

One death may be anybody's fault, and counts once, of however many that ask for the same; a request that was there at
two is refused, so that it and its retries end no third engine. An answer that comes whole absolves: of prompts that
many send, one is in flight at every death. A session whose prompt still arrives asks for nothing yet that could be
known again.
"""

import hashlib
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from control_plane.dispatch.journey import MOST_DEATHS
from control_plane.model.job import Job
from control_plane.model.worker_snapshot import WorkerSnapshot

# From the last death on.
REMEMBER_S = 600.0
_MOST_REMEMBERED = 1024


@dataclass(slots=True)
class _Suspect:
    """engines: those that died, as (worker, generation)."""

    engines: set[tuple[str, int]]
    last_s: float


class PoisonMemory:
    """Of one router. Times are monotonic seconds."""

    def __init__(self, remember_s: float = REMEMBER_S) -> None:
        self.remember_s = remember_s
        # By fingerprint, the one with the last death last.
        self._suspects: OrderedDict[bytes, _Suspect] = OrderedDict()

    def __len__(self) -> int:
        return len(self._suspects)

    def poisoned(self, now_s: float) -> int:
        """Those that are refused."""
        self._forget(now_s)
        return sum(len(suspect.engines) >= MOST_DEATHS for suspect in self._suspects.values())

    def deaths(self, job: Job, now_s: float) -> int:
        """Engines that died, not longer ago than is remembered, while they worked on what this request asks for."""
        self._forget(now_s)
        is_known = self._suspects and not job.prompt_changes
        known = self._suspects.get(_fingerprint(job)) if is_known else None
        return len(known.engines) if known is not None else 0

    def blame(self, job: Job, worker: WorkerSnapshot, now_s: float) -> None:
        """The worker's engine died while it worked on the request."""
        if job.prompt_changes:
            return
        self._forget(now_s)
        fingerprint = _fingerprint(job)
        known = self._suspects.setdefault(fingerprint, _Suspect(set(), now_s))
        known.engines.add((worker.worker_id, worker.generation))
        known.last_s = now_s
        self._suspects.move_to_end(fingerprint)
        while len(self._suspects) > _MOST_REMEMBERED:
            self._suspects.popitem(last=False)

    def absolve(self, job: Job) -> None:
        """The request got its whole answer."""
        if self._suspects:
            self._suspects.pop(_fingerprint(job), None)

    def _forget(self, now_s: float) -> None:
        while self._suspects:
            fingerprint, oldest = next(iter(self._suspects.items()))
            if now_s - oldest.last_s < self.remember_s:
                return
            del self._suspects[fingerprint]


def _fingerprint(job: Job) -> bytes:
    """What an engine is given: another prompt, sampling or tenant is another request."""
    digest = hashlib.blake2b(job.sampling.SerializeToString(deterministic=True), digest_size=16)
    digest.update(f"{job.scope.cache_salt}\n{job.scope.adapter_digest}".encode())
    digest.update(np.asarray(job.token_ids, dtype=np.uint32).tobytes())
    return digest.digest()
