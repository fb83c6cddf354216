"""How far two prompts agree. Pure."""

from collections.abc import Sequence

_STRIDE = 512


def longest_common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Number of leading tokens that both have in common."""
    end = min(len(first), len(second))
    start = 0
    while start < end and first[start : start + _STRIDE] == second[start : start + _STRIDE]:
        start += _STRIDE
    start = min(start, end)
    while start < end and first[start] == second[start]:
        start += 1
    return start
