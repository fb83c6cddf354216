"""The tokens that an imitated GPU answers with: arbitrary, and the same for a prompt on every worker; pure.

A token follows from the prompt, the request's own seed and its place in the answer. So an answer that goes on at
another worker goes on as it would have, and one to the wrong prompt shows.
"""

import hashlib
from array import array
from collections.abc import Callable, Collection, Sequence

_ANSWERS_LOOKED_AT = 4096
_MASK = (1 << 64) - 1


def answer_tokens(vocabulary_size: int, special: Collection[int], text_of: Callable[[int], str]) -> list[int]:
    """What answers are made of: tokens that are printable text each by itself, and end nothing.

    special: tokens with a meaning of their own. Where a vocabulary begins with nothing of the kind, all but those.
    """
    usual = [token for token in range(min(vocabulary_size, _ANSWERS_LOOKED_AT)) if token not in special]
    plain = [token for token in usual if (text := text_of(token)) and text.isascii() and text.isprintable()]
    return plain or usual


class Answers:
    """tokens: what answers are made of, in an order that all workers share."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tuple(tokens)

    def seed_of(self, prompt: Sequence[int], seed: int | None) -> int:
        """Of all tokens of one answer. seed: the request's own, where it has one."""
        digest = hashlib.blake2b(array("I", prompt).tobytes(), digest_size=8, key=str(seed or 0).encode()).digest()
        return int.from_bytes(digest, "little")

    def token(self, answer_seed: int, place: int) -> int:
        """place: of the token, in prompt and answer together."""
        # The finaliser of SplitMix64: neighbours have nothing in common.
        mixed = (answer_seed + place * 0x9E3779B97F4A7C15) & _MASK
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        return self._tokens[(mixed ^ (mixed >> 31)) % len(self._tokens)]
