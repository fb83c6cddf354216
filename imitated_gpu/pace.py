"""When the steps of an imitated GPU end; pure. All times are seconds of one monotonic clock.

A step that goes on with a request of the one before begins when that one ended by the model: what the engine does in
between is hidden behind the step, as it is where a GPU is given its next step before it is done with the last. So the
errors of single steps do not add up. What the engine does beyond a whole step is late, and is not made up for.
"""

import math
from collections.abc import Collection


class Pace:
    def __init__(self) -> None:
        self._ended_s = -math.inf
        self._names: Collection[str] = ()

    def ends_s(self, names: Collection[str], step_s: float, now_s: float) -> float:
        """names: of the step's requests. step_s: what it takes. Never before `now_s`."""
        before = self._names
        goes_on = any(name in before for name in names)
        began_s = min(self._ended_s, now_s) if goes_on else now_s
        self._ended_s, self._names = max(began_s + step_s, now_s), names
        return self._ended_s
