"""How many prompt tokens a step may compute beside what decodes: chunks by cost. Pure.

A chunk of fixed size is too long beside a large batch of long contexts, and too short beside a small one. So the chunk
is the largest one whose step stays within a bound, by what steps cost on this worker: a share of the TPOT objective.
"""

from collections.abc import Callable


def largest_chunk(step_s: Callable[[int], float], most_tokens: int, bound_s: float) -> int:
    """The largest number of prompt tokens with which a step lasts at most `bound_s`; 0 where none fits.

    step_s: seconds of a step that computes so many prompt tokens; must not fall as they grow. It is asked about
    log2(most_tokens) times. most_tokens: what there is to compute, and room for in a step.
    """
    if most_tokens < 1 or step_s(1) > bound_s:
        return 0
    if step_s(most_tokens) <= bound_s:
        return most_tokens
    fits, exceeds = 1, most_tokens
    while exceeds - fits > 1:
        middle = (fits + exceeds) // 2
        if step_s(middle) <= bound_s:
            fits = middle
        else:
            exceeds = middle
    return fits
