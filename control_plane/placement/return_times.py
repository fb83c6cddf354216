"""When those come back who were refused. Pure.

Many are refused at one moment, and would all come back at one, when one of them is in time. So each is told to come
after those before it, by what their prefills take of all workers together: as cells of a virtual schedule (GCRA, ITU-T
I.371). Who does not come back leaves a gap, and nobody is sent further than `_MOST_S` for the sake of others.
"""

_MOST_S = 30.0


class ReturnTimes:
    """Of one router."""

    def __init__(self) -> None:
        # When the next one may come, for all that those before it take. Monotonic.
        self._next_s = 0.0

    def told(self, in_time_s: float, takes_s: float, now_s: float) -> float:
        """Seconds from now. in_time_s: until one would be in time, if nothing else came. takes_s: of all workers'."""
        first_s = now_s + in_time_s
        behind_s = max(self._next_s - first_s, 0.0)
        if behind_s > _MOST_S:
            # They begin anew, beside those who come then.
            behind_s = 0.0
        self._next_s = first_s + behind_s + takes_s
        return in_time_s + behind_s
