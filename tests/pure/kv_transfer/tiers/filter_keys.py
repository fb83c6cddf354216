"""Keys for a hotness filter: a few, a range, and as many at a time as a prompt has."""

import numpy as np

from kv_transfer.tiers.hotness_filter import HotnessFilter, Keys

PROMPT_BLOCKS = 312


def keys_of(*numbers: int) -> Keys:
    return np.array(numbers, np.uint64)


def key_range(first: int, count: int) -> Keys:
    return np.arange(first, first + count, dtype=np.uint64)


def frequencies(hotness: HotnessFilter, *numbers: int) -> list[int]:
    found: list[int] = hotness.look_up(keys_of(*numbers)).frequency.tolist()
    return found


def touch_prompts(hotness: HotnessFilter, keys: Keys) -> int:
    """Touches all keys, those of one prompt at a time; returns how many were refused."""
    refused = 0
    for first in range(0, len(keys), PROMPT_BLOCKS):
        refused += int((hotness.touch(keys[first : first + PROMPT_BLOCKS]) == 0).sum())
    return refused
