"""The batches whose decode steps are timed: what their requests share, and what KV a step reads of it.

A request's prompt is a path of segments that others may share, from the root, and a suffix of its own. Two requests
share the blocks of their common segments, rounded down to whole blocks, as in any paged prefix cache. From that and
from the order of the batch follow exactly: the KV tokens that a step reads in all, the distinct ones among them, and
for each that is read again how many tokens are read from one time to the next (its reuse distance).

`divergent` requests, the last of the batch, have a prefix of their own that is as long as the shared one. `strangers`,
the last as well, share nothing and have a suffix only: they end homogeneity without bytes to read.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Order = Literal["interleaved", "grouped"]
# (which of its siblings, tokens)
Segment = tuple[int, int]
Path = tuple[Segment, ...]

# Longest batch of the series that look for an all-or-nothing path.
_SERIES_BATCH = 16
_FIRST_DIVERGENT = (0, 1, 2, 3, 4)


@dataclass(frozen=True, slots=True)
class KvReads:
    """KV tokens that one step reads."""

    total_tokens: int
    distinct_tokens: int
    # Those read before in this step, by reuse distance in tokens.
    by_reuse: Mapping[int, int] = field(default_factory=dict)

    def missed(self, capacity_tokens: float) -> int:
        """Of those read again, what a cache of so many tokens, least recently used first out, no longer holds."""
        return sum(tokens for distance, tokens in self.by_reuse.items() if distance > capacity_tokens)


@dataclass(frozen=True, slots=True)
class BatchShape:
    """What the requests of a batch share, and in which order they stand."""

    batch: int
    # (groups, tokens) of each level of the tree that requests share, from the root; request i is in group
    # i modulo groups.
    levels: tuple[tuple[int, int], ...]
    suffix_tokens: int
    # `interleaved` keeps the order of the numbers, `grouped` puts requests next to each other that share most.
    order: Order = "interleaved"
    divergent: int = 0
    strangers: int = 0

    @property
    def shared_tokens(self) -> int:
        return sum(tokens for _, tokens in self.levels)

    @property
    def longest_tokens(self) -> int:
        return self.shared_tokens + self.suffix_tokens

    @property
    def groups(self) -> int:
        return len(set(self.paths()))

    def paths(self) -> list[Path]:
        """Of each request, in the order of the batch."""
        alike = self.batch - self.divergent - self.strangers
        paths = [tuple((index % groups, tokens) for groups, tokens in self.levels) for index in range(alike)]
        if self.order == "grouped":
            paths.sort()
        own = itertools.count(self.levels[0][0])
        paths += [((next(own), self.shared_tokens),) for _ in range(self.divergent)]
        return paths + [()] * self.strangers

    def lengths(self) -> list[int]:
        """KV tokens of each request."""
        return [_tokens(path) + self.suffix_tokens for path in self.paths()]

    def reads(self, block_tokens: int) -> KvReads:
        """With KV in blocks of so many tokens."""
        paths, lengths = self.paths(), self.lengths()
        by_reuse: Counter[int] = Counter()
        for index, path in enumerate(paths):
            covered = distance = 0
            for before in range(index - 1, -1, -1):
                distance += lengths[before]
                common = _common_blocks(path, paths[before], block_tokens) * block_tokens
                if common > covered:
                    by_reuse[distance] += common - covered
                    covered = common
        total = sum(lengths)
        return KvReads(total, total - by_reuse.total(), dict(by_reuse))

    def block_tables(self, block_tokens: int, fresh: Iterator[int]) -> list[list[int]]:
        """Blocks of each request, new ones taken from `fresh`; what two requests share lies in the same blocks."""
        paths, tables = self.paths(), list[list[int]]()
        for path, length in zip(paths, self.lengths(), strict=True):
            shared = [
                table[: _common_blocks(path, other, block_tokens)] for other, table in zip(paths, tables, strict=False)
            ]
            table = list(max(shared, key=len, default=()))
            tables.append([*table, *itertools.islice(fresh, -(-length // block_tokens) - len(table))])
        return tables


def _tokens(path: Path) -> int:
    return sum(tokens for _, tokens in path)


def _common_blocks(one: Path, other: Path, block_tokens: int) -> int:
    """Whole blocks that two requests share."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return sum(tokens for (_, tokens), _ in pairs) // block_tokens


@dataclass(frozen=True, slots=True)
class Grid:
    """What is combined. Besides `groups`, always as many groups as requests."""

    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    groups: tuple[int, ...] = (1, 2, 5)
    shared_tokens: tuple[int, ...] = (512, 2000, 3500)
    suffix_tokens: tuple[int, ...] = (32, 128)

    def shapes(self) -> list[BatchShape]:
        """All of it, each once: the plain groups, the series and the trees."""
        return list(dict.fromkeys([*self.plain(), *self.trees(), *self.series()]))

    def plain(self) -> list[BatchShape]:
        """Groups that share one prefix each."""
        shapes = []
        for batch, shared, suffix in itertools.product(self.batches, self.shared_tokens, self.suffix_tokens):
            for groups in sorted({*self.groups, batch}):
                if groups <= batch:
                    shapes += [
                        BatchShape(batch, ((groups, shared),), suffix, order) for order in _orders(groups, batch)
                    ]
        return shapes

    def trees(self) -> list[BatchShape]:
        """Two and three levels, as long together as the longest prefix, in the largest batch of the series."""
        batch, shared, suffix = self.series_batch, max(self.shared_tokens), min(self.suffix_tokens)
        half, third = shared // 2, shared // 3
        levels: list[tuple[tuple[int, int], ...]] = [
            ((1, half), (groups, half)) for groups in sorted({*self.groups, batch}) if 1 < groups <= batch
        ]
        if batch >= 4:
            levels.append(((1, third), (2, third), (batch // 2, third)))
        return [
            BatchShape(batch, each, suffix, order) for each in levels for order in _orders(each[-1][0], batch)
        ]  # fmt: skip

    def series(self) -> list[BatchShape]:
        """For each prefix length: more and more divergent requests, and one stranger."""
        return [shape for shared in self.shared_tokens for shape in (*self.divergence(shared), self.stranger(shared))]

    def divergence(self, shared: int) -> list[BatchShape]:
        """A homogeneous batch of which ever more requests are divergent."""
        batch = self.series_batch
        doubled = itertools.takewhile(lambda number: number < batch, (8 << power for power in itertools.count()))
        numbers = sorted({number for number in (*_FIRST_DIVERGENT, *doubled, batch - 1) if number < batch})
        return [self._of_series(shared, divergent=number) for number in numbers]

    def stranger(self, shared: int) -> BatchShape:
        """The homogeneous batch with a stranger in place of one of its requests."""
        return self._of_series(shared, strangers=1)

    def _of_series(self, shared: int, divergent: int = 0, strangers: int = 0) -> BatchShape:
        levels, suffix = ((1, shared),), min(self.suffix_tokens)
        return BatchShape(self.series_batch, levels, suffix, divergent=divergent, strangers=strangers)

    @property
    def series_batch(self) -> int:
        return min(max(self.batches), _SERIES_BATCH)


QUICK = Grid((1, 4, 8), (1, 2), (512, 2000), (32,))


def _orders(groups: int, batch: int) -> tuple[Order, ...]:
    """Where the order makes a difference, both."""
    return ("interleaved", "grouped") if 1 < groups < batch else ("interleaved",)


def longest_paths(shapes: Iterable[BatchShape]) -> list[Path]:
    """Every prefix of the shapes, each in its greatest length."""
    longest: dict[tuple[int, ...], Path] = {}
    for path in {path for shape in shapes for path in shape.paths() if path}:
        name = tuple(index for index, _ in path)
        longest[name] = max(path, longest.get(name, ()), key=_tokens)
    return sorted(longest.values())


def pool_blocks(shapes: Sequence[BatchShape], block_tokens: int) -> int:
    """Blocks that hold all prefixes at once, and the suffixes of a few of the largest batches."""
    segments: dict[tuple[int, ...], int] = {}
    for path in {path for shape in shapes for path in shape.paths()}:
        for depth, (_, tokens) in enumerate(path, start=1):
            name = tuple(index for index, _ in path[:depth])
            segments[name] = max(tokens, segments.get(name, 0))

    def blocks(tokens: int) -> int:
        # Both ends may lie in the middle of a block.
        return tokens // block_tokens + 2

    suffixes = max(shape.batch * blocks(shape.suffix_tokens) for shape in shapes)
    return sum(map(blocks, segments.values())) + 4 * suffixes
