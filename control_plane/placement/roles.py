"""How many of the workers that do both are prefill-heavy: as many as what is asked for needs. Pure.

A role is a bias of placement and no more: a worker changes it without a restart, and what decodes there goes on. With h
of n workers prefill-heavy,
    prompts fill     P / h of the prefill-heavy workers
    decodes fill     (c + S / (n - h)) / b of the others
P: seconds of engine time a second that prompts take, less what is cached, as averaged over `_MEMORY_S`. c: of a step
that decodes, whatever it decodes; S: what the requests and contexts of all that decodes, or will, add to it; b: what a
step may take (`Objectives.step_s`). Who is fuller makes requests late, so h is where the fuller ones are least full,
up to an eighth of the workers: beside decodes, prompts cost hardly more than alone, and no cache is there twice. What
needs whole steps, because its prompt is long or late, needs few workers.

A slow loop takes it there: it looks every `_LOOK_S`, changes few workers at a time, and none where little is gained, so
that noise in what comes turns no worker back and forth; where prompts need none any more they have none.
"""

import math
from dataclasses import dataclass

# Of what prompts take, an average over about so long.
_MEMORY_S = 20.0
_LOOK_S = 2.0
# The fuller workers have to become less full by this share.
_LEAST_GAIN = 0.05
# Of all workers, how many may change their role at a look; one may in any case.
_MOST_CHANGE = 1 / 16
# Up to this share of all workers' time prompts need no worker for themselves; one that is theirs stays so down to the
# second.
_IDLE, _IDLE_AGAIN = 0.05, 0.035
# Between none and one there is no choice: prompts have to ask for it for so long, one that is long and alone does not.
_HOLD_S = 6.0
# Of so few workers one that decodes little is too much; of more, one is not.
_FEW = 3
_MOST_HEAVY = 1 / 8


@dataclass(frozen=True, slots=True)
class Decodes:
    """What decodes ask of steps. step_s: c; added_s: S; bound_s: b."""

    step_s: float
    added_s: float
    bound_s: float


class Roles:
    """One router's. share: of the workers, where that is set; None: as many as are needed."""

    def __init__(self, share: float | None = None) -> None:
        self._share = share
        # Decayed seconds of prompts, and as of when.
        self._sum_s = 0.0
        self._at_s = self._looked_s = -math.inf
        self._heavy = 0
        # Since when none are wanted where there are some, or some where there are none.
        self._turns_s = math.inf
        # How often a worker has changed its role.
        self.changes = 0

    def prompt(self, own_s: float, now_s: float) -> None:
        """A prompt takes so much engine time; what is no number of seconds is none."""
        if math.isfinite(own_s):
            self._sum_s = self._decayed_s(now_s) + own_s
            self._at_s = now_s

    def heavy(self, workers: int) -> int:
        """How many are prefill-heavy now."""
        if self._share is not None:
            return int(self._share * workers)
        return min(self._heavy, most_heavy(workers))

    def is_due(self, now_s: float) -> bool:
        """`look` would look."""
        return self._share is None and now_s - self._looked_s >= _LOOK_S

    def look(self, workers: int, decodes: Decodes, others: float, now_s: float) -> None:
        """others: P of the other routers, as they have told it."""
        self._looked_s = now_s
        prompts = self.prompts(now_s) + others
        now = self.heavy(workers)
        idle = _IDLE_AGAIN if now else _IDLE
        best = wanted(workers, prompts, decodes, idle)
        if not self._has_held(now, best, now_s):
            return
        full, fullest = (fill(heavy, workers, prompts, decodes, idle) for heavy in (best, now))
        if not best or full < (1 - _LEAST_GAIN) * fullest:
            most = max(1, int(_MOST_CHANGE * workers))
            self._heavy = now + max(-most, min(most, best - now))
            self.changes += abs(self._heavy - now)

    def prompts(self, now_s: float) -> float:
        """P, of this router's; less than it is while it begins."""
        return self._decayed_s(now_s) / _MEMORY_S

    def _decayed_s(self, now_s: float) -> float:
        return self._sum_s * math.exp((self._at_s - now_s) / _MEMORY_S)

    def _has_held(self, now: int, best: int, now_s: float) -> bool:
        if bool(now) == bool(best):
            self._turns_s = math.inf
            return True
        self._turns_s = min(self._turns_s, now_s)
        return now_s - self._turns_s >= _HOLD_S


def wanted(workers: int, prompts: float, decodes: Decodes, idle: float = _IDLE) -> int:
    """How many prefill-heavy workers, of those that there may be, leave the fuller ones least full; the fewest."""
    return min(range(most_heavy(workers) + 1), key=lambda heavy: fill(heavy, workers, prompts, decodes, idle))


def most_heavy(workers: int) -> int:
    """How many may be prefill-heavy."""
    return max(1, int(_MOST_HEAVY * workers)) if workers > _FEW else 0


def fill(heavy: int, workers: int, prompts: float, decodes: Decodes, idle: float = _IDLE) -> float:
    """Of the fuller workers, where `heavy` of them are prefill-heavy: infinite where prompts have none and need one,
    because they take more than the share `idle` of all workers' time."""
    decoding = (decodes.step_s + decodes.added_s / (workers - heavy)) / decodes.bound_s
    if not heavy:
        return math.inf if prompts > idle * workers else decoding
    return max(prompts / heavy, decoding)
