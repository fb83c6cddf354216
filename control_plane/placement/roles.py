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
Of four to fifteen workers one may be prefill-heavy, and whether it is prompts decide alone. Routers tell each other P,
and whether they have any, so that they look at the same.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from control_plane.fleet.other_routers import PREFILL_RATE_MEMORY_S as _MEMORY_S

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
# No prompt takes longer: what is said of one that does is an error, and soon forgotten.
_MOST_S = 86_400.0
# Of so few workers one that decodes little is too much; of more, one is not.
_FEW = 3
_MOST_HEAVY = 1 / 8


@dataclass(frozen=True, slots=True)
class Decodes:
    """What decodes ask of steps. step_s: c; added_s: S; bound_s: b."""

    step_s: float
    added_s: float
    bound_s: float


class ToldRoles(NamedTuple):
    """What routers tell each other. prefill_rate: P; prefill_heavy: how many they have."""

    prefill_rate: float = 0.0
    prefill_heavy: int = 0


class Roles:
    """One router's. share: of the workers, where that is set; None: as many as are needed."""

    def __init__(self, share: float | None = None) -> None:
        self._share = share
        # Decayed seconds of prompts, for how long they have been counted, and as of when.
        self._sum_s = self._seen_s = 0.0
        self._at_s = self._looked_s = -math.inf
        self._heavy = 0
        # Since when none are wanted where there are some, or some where there are none.
        self._turns_s = math.inf
        # How often a worker has changed its role.
        self.changes = 0

    def prompt(self, own_s: float, now_s: float) -> None:
        """A prompt takes so much engine time; what is no number of seconds is none."""
        if math.isfinite(own_s):
            self._pass_to(now_s)
            self._sum_s += min(own_s, _MOST_S)

    def pause(self, now_s: float) -> None:
        """Until now nothing could be counted, nor is anything forgotten."""
        self._at_s = now_s

    def heavy(self, workers: int) -> int:
        """How many of so many are prefill-heavy now."""
        if self._share is not None:
            return int(self._share * workers)
        return min(self._heavy, most_heavy(workers))

    def heavy_of(self, registered: Sequence[str], usable: Sequence[str]) -> frozenset[str]:
        """Who is: of the usable ones the first of all that are registered, so that nobody on whom others decode takes
        the place of one that is away."""
        names = frozenset(registered[: self.heavy(len(registered))])
        there = [each for each in usable if each in names] if names else []
        return frozenset(there if self._share is not None else there[: most_heavy(len(usable))])

    def is_due(self, now_s: float) -> bool:
        """`look` would look."""
        return self._share is None and now_s - self._looked_s >= _LOOK_S

    def look(self, workers: int, decodes: Decodes, others: ToldRoles, now_s: float) -> None:
        """workers: registered. others: of the other routers together."""
        self._looked_s = now_s
        prompts = self.prompts(now_s) + others.prefill_rate
        now = self.heavy(workers)
        idle = _IDLE_AGAIN if now or others.prefill_heavy else _IDLE
        best = wanted(workers, prompts, decodes, idle)
        if not self._has_held(now, best, now_s):
            return
        full, fullest = (fill(heavy, workers, prompts, decodes, idle) for heavy in (best, now))
        if not best or full < (1 - _LEAST_GAIN) * fullest:
            most = max(1, int(_MOST_CHANGE * workers))
            self._heavy = now + max(-most, min(most, best - now))
            self.changes += abs(self._heavy - now)

    def prompts(self, now_s: float) -> float:
        """P, of this router's."""
        self._pass_to(now_s)
        return self._sum_s / (_MEMORY_S * -math.expm1(-max(self._seen_s, _HOLD_S) / _MEMORY_S))

    def _pass_to(self, now_s: float) -> None:
        if self._sum_s:
            self._sum_s *= math.exp((self._at_s - now_s) / _MEMORY_S)
            self._seen_s += now_s - self._at_s
        self._at_s = now_s

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
