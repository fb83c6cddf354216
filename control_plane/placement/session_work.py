"""What a session that is open counts for where another one is placed: what sessions' prompts have taken of late. Pure.

Hardly anything of a session has come when it opens, and all that comes later is computed where it opened. Counted by
what has come, workers with many sessions look as idle as those without, and one of them gets nearly all.
"""

import numpy as np

from control_plane.fleet.loads import Floats

# The mean follows about so many.
_FOLLOWS = 20
# Until the first has become whole: more than what workers' own figures differ by, less than a prompt that matters.
_UNKNOWN_S = 0.1


class SessionWork:
    """Of one router. Told of sessions whose prompts have become whole."""

    def __init__(self) -> None:
        self._mean_s: float | None = None

    @property
    def mean_s(self) -> float:
        """Seconds of engine time."""
        return _UNKNOWN_S if self._mean_s is None else self._mean_s

    def became_whole(self, prefill_s: Floats) -> None:
        """prefill_s: of the whole prompt, on each worker that may prefill; of no worker it says nothing."""
        if not len(prefill_s):
            return
        # The median, and of two the lower: who says that it is slow does not say what a session brings.
        usual_s = float(np.sort(prefill_s)[(len(prefill_s) - 1) // 2])
        self._mean_s = usual_s if self._mean_s is None else self._mean_s + (usual_s - self._mean_s) / _FOLLOWS
