"""How many prompt tokens a step may compute beside running decodes, so that it takes no longer than they can bear.

Pure. Source: prototypes of workers that prefill and decode; docs/decisions/0062.
"""

from bisect import bisect_right
from collections.abc import Callable


def largest_chunk(step_s: Callable[[int], float], most_tokens: int, bound_s: float) -> int:
    """The largest number of prompt tokens, up to `most_tokens`, with which a step takes `bound_s` at most.

    step_s: seconds of a step with so many tokens, never fewer for more of them. 0: not even one token fits.
    """
    return bisect_right(range(1, most_tokens + 1), bound_s, key=step_s)
