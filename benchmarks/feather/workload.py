"""Requests for `rachis bench feather`: trees of shared prefixes, and when the requests arrive."""

import random
from dataclasses import dataclass

from cluster_core.errors import InvalidInputError

MOST_LEVELS = 3


@dataclass(frozen=True, slots=True)
class FeatherWorkload:
    """What arrives, and what it shares."""

    # Prefixes that requests have one of, all equally likely; 0: nobody shares anything.
    groups: int = 5
    # Of a prefix.
    shared_tokens: int = 3500
    # Of the tree of prefixes, each an equal part: of two levels all groups share the first, of three pairs of
    # groups share the second too.
    levels: int = 1
    # Of each prompt alone.
    suffix_tokens: int = 24
    # Generated for each request.
    decode_tokens: int = 64
    # Arrivals a second, Poisson.
    rate: float = 40.0
    # How long requests arrive.
    seconds: float = 10.0
    seed: int = 0

    @property
    def longest_tokens(self) -> int:
        return self.shared_tokens + self.suffix_tokens + self.decode_tokens

    def blocks(self, block_tokens: int, places: int) -> int:
        """Device blocks for all prefixes and for twice as many requests as run at once."""
        own = self.longest_tokens if self.groups == 0 else self.suffix_tokens + self.decode_tokens
        return self.groups * _blocks(self.shared_tokens, block_tokens) + 2 * places * (_blocks(own, block_tokens) + 1)

    def prefixes(self, vocabulary_size: int) -> list[list[int]]:
        """One for each group."""
        part, rest = divmod(self.shared_tokens, self.levels)

        def tokens(level: int, group: int) -> list[int]:
            # Who is in the same branch of a level has the same tokens there.
            branch = group if level == self.levels - 1 else group // 2 * level
            rng = random.Random(f"{self.seed} {level} {branch}")
            return [rng.randrange(vocabulary_size) for _ in range(part + (rest if level == self.levels - 1 else 0))]

        return [[each for level in range(self.levels) for each in tokens(level, group)] for group in range(self.groups)]

    def arrivals(self, vocabulary_size: int) -> list[tuple[float, list[int]]]:
        """(seconds since the start, prompt), ascending."""
        rng = random.Random(f"{self.seed} arrivals")
        prefixes = self.prefixes(vocabulary_size)

        def text(tokens: int) -> list[int]:
            return [rng.randrange(vocabulary_size) for _ in range(tokens)]

        now_s, found = rng.expovariate(self.rate), []
        while now_s < self.seconds:
            shared = rng.choice(prefixes) if prefixes else text(self.shared_tokens)
            found.append((now_s, shared + text(self.suffix_tokens)))
            now_s += rng.expovariate(self.rate)
        return found


def require_model_length(workload: FeatherWorkload, max_model_len: int) -> None:
    if workload.longest_tokens > max_model_len:
        raise InvalidInputError(
            f"prompt and answer have {workload.longest_tokens} tokens, the model takes {max_model_len}",
            field="shared_tokens",
        )


def _blocks(tokens: int, block_tokens: int) -> int:
    return -(-tokens // block_tokens)
