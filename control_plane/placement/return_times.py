"""When those come back who were refused. Pure.

Many are refused at one moment, and would all come back at one, when one of them is in time. So each is told to come
after those before it, by what their prefills take of all workers together: as cells of a virtual schedule (GCRA, ITU-T
I.371). Each tenant has a schedule of its own for each priority, as it waits by itself at the engines: who asks again
without waiting sends nobody else away. Who does not come back leaves a gap, and nobody is sent further than `_MOST_S`
for the sake of others, nor for what waits: that is a guess, and the longer the worse.
"""

from collections import OrderedDict

from cluster_core.tenant_shares import Claimant

_MOST_S = 30.0
# Schedules; beyond, the one that was told of longest ago begins anew.
_MOST_SCHEDULES = 4096
_ANYBODY = Claimant()


class ReturnTimes:
    """Of one router."""

    def __init__(self) -> None:
        # When the next one may come, for all that those before it take. Monotonic. Who was told last comes last.
        self._next_s: OrderedDict[Claimant, float] = OrderedDict()

    def told(self, in_time_s: float, takes_s: float, now_s: float, whose: Claimant = _ANYBODY) -> float:
        """Seconds from now. in_time_s: until one would be in time, if nothing else came. takes_s: of all workers'."""
        in_time_s = min(in_time_s, _MOST_S)
        first_s = now_s + in_time_s
        behind_s = max(self._next_s.pop(whose, first_s) - first_s, 0.0)
        if behind_s > _MOST_S:
            # They begin anew, beside those who come then.
            behind_s = 0.0
        self._next_s[whose] = first_s + behind_s + takes_s
        if len(self._next_s) > _MOST_SCHEDULES:
            self._next_s.popitem(last=False)
        return in_time_s + behind_s

    def check_invariants(self) -> None:
        assert len(self._next_s) <= _MOST_SCHEDULES, "more schedules than may be"
