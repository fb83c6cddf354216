"""Sessions whose context arrives in pieces, drawn from the published distributions of two retrievers.

Source: tables of the Stream2LLM artifact (arXiv:2604.16395, section 6.1; data CC-BY-4.0). `append` is its web crawler:
pages are added as they are fetched. `update` is its vector search: a list of documents is replaced by a refined one.
Values come from the inverse of the distribution, straight between published percentiles, which makes the mean of the
very skewed gaps of `update` 40% too high. What is not published is marked below and chosen so that the published mean
comes out; documents of a list and their replacement are a model.

A trace depends on its specification, the vocabulary and the model's length alone, so that every policy gets the same
one. Times are seconds since the trace began. Scales fit it to a machine: `token_scale` multiplies the tokens of the
context, `time_scale` the retriever's delays, not the arrivals.
"""

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from cluster_core.engine_jobs import SessionMode
from cluster_core.errors import InvalidInputError

# (share, value), ascending: the value below which that share of the draws lies.
Percentiles = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Retriever:
    """Per session: tokens of the final context, pieces, milliseconds until the first and between two of them."""

    tokens: Percentiles
    chunks: Percentiles
    first_chunk_ms: float
    inter_chunk_ms: Percentiles


RETRIEVERS: Mapping[SessionMode, Retriever] = {
    # 4,322 queries. Not published: the ends of tokens; the quartiles of chunks, which the paper calls "concentrated
    # around 6 to 10"; the first delay, which is the mean duration less the mean of the gaps.
    SessionMode.APPEND: Retriever(
        tokens=((0, 1), (0.5, 5749), (0.75, 11_167), (0.95, 28_372), (1, 32_673)),
        chunks=((0, 1), (0.25, 6), (0.5, 8), (0.75, 10), (1, 17)),
        first_chunk_ms=9869.61 - 6.86 * 1053.0,
        inter_chunk_ms=(
            (0, 3.01), (0.05, 81.85), (0.25, 387.12), (0.5, 700.67), (0.75, 1339.52), (0.95, 3077.99),
            (0.99, 5293.35), (1, 34_946.56),
        ),
    ),
    # 4,997 queries, tokens of 500. Not published: as above, and the p75 and p95 of chunks.
    SessionMode.UPDATE: Retriever(
        tokens=((0, 5000), (0.5, 10_126), (0.75, 14_615), (0.95, 30_618), (1, 34_619)),
        chunks=((0, 1), (0.5, 4), (0.75, 5), (0.95, 8), (1, 26)),
        first_chunk_ms=3630.26 - 3.42 * 157.14,
        inter_chunk_ms=(
            (0, 0.21), (0.05, 1.39), (0.25, 11.25), (0.5, 36.68), (0.75, 124.33), (0.95, 698.8), (0.99, 2079.26),
            (1, 8916.65),
        ),
    ),
}  # fmt: skip

# Tokens before and after the context: instructions, and the question with the header of the answer.
PREFIX_TOKENS = (16, 64)
CLOSING_TOKENS = (8, 32)
# Documents of a list in update mode.
TOP_K = 10
GENERATED_TOKENS = 1


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """coupled: the more pieces a context has, the more tokens; otherwise one says nothing of the other. Neither is
    published.

    Raises InvalidInputError for a rate or scale that is no number to multiply by.
    """

    mode: SessionMode
    sessions: int
    rate_per_s: float
    token_scale: float = 1.0
    time_scale: float = 1.0
    seed: int = 0
    coupled: bool = False

    def __post_init__(self) -> None:
        for name in ("rate_per_s", "token_scale", "time_scale"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0 or (value == 0 and name == "rate_per_s"):
                raise InvalidInputError(f"must be a finite number above 0, got {value}", field=name)


@dataclass(frozen=True, slots=True)
class TimedInput:
    """tokens: what is appended, or in update mode the whole prompt that replaces the one before."""

    at_s: float
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TracedSession:
    """Opened with its prefix at `arrival_s`; finished with its closing tokens together with the last input."""

    arrival_s: float
    mode: SessionMode
    prefix: tuple[int, ...]
    inputs: tuple[TimedInput, ...]
    closing: tuple[int, ...]

    @property
    def finish_s(self) -> float:
        return self.inputs[-1].at_s

    @property
    def prompt(self) -> tuple[int, ...]:
        """The final prompt, as a client sends it that waits for its retriever."""
        if self.mode is SessionMode.UPDATE:
            return self.inputs[-1].tokens + self.closing
        return self.prefix + tuple(token for each in self.inputs for token in each.tokens) + self.closing


def draw_trace(spec: WorkloadSpec, vocabulary_size: int, max_model_len: int) -> tuple[TracedSession, ...]:
    """The sessions of `draw_sessions`, all at once."""
    return tuple(draw_sessions(spec, vocabulary_size, max_model_len))


def draw_sessions(spec: WorkloadSpec, vocabulary_size: int, max_model_len: int) -> Iterator[TracedSession]:
    """Sessions by arrival, which is a Poisson process. Longer contexts are cut to what the model takes.

    Raises InvalidInputError for a model too short for any context.
    """
    longest = max_model_len - GENERATED_TOKENS - PREFIX_TOKENS[1] - CLOSING_TOKENS[1]
    if longest < 1:
        raise InvalidInputError(f"{max_model_len} tokens are too few for any context", field="engine.max_model_len")
    rng = random.Random(spec.seed)
    arrival_s = 0.0
    for _ in range(spec.sessions):
        yield _session(rng, spec, arrival_s, vocabulary_size, longest)
        arrival_s += rng.expovariate(spec.rate_per_s)


def draw(percentiles: Percentiles, rng: random.Random) -> float:
    return value_at(percentiles, rng.random())


def value_at(percentiles: Percentiles, share: float) -> float:
    """Below which that share of the draws lies."""
    for (low_share, low), (high_share, high) in pairwise(percentiles):
        if share <= high_share:
            return low + (high - low) * (share - low_share) / (high_share - low_share)
    raise AssertionError("the last share is 1")


def _session(
    rng: random.Random, spec: WorkloadSpec, arrival_s: float, vocabulary_size: int, longest: int
) -> TracedSession:
    retriever = RETRIEVERS[spec.mode]
    prefix = _tokens(rng, rng.randint(*PREFIX_TOKENS), vocabulary_size)
    closing = _tokens(rng, rng.randint(*CLOSING_TOKENS), vocabulary_size)
    share = rng.random()
    total = min(longest, max(1, round(value_at(retriever.tokens, share) * spec.token_scale)))
    chunks = max(1, round(value_at(retriever.chunks, share if spec.coupled else rng.random())))
    if spec.mode is SessionMode.APPEND:
        pieces = [_tokens(rng, size, vocabulary_size) for size in _split(rng, total, min(chunks, total))]
    else:
        pieces = [prefix + context for context in _refinements(rng, total, chunks, vocabulary_size)]
    gaps_ms = [retriever.first_chunk_ms, *(draw(retriever.inter_chunk_ms, rng) for _ in pieces[1:])]
    at_s = [arrival_s + delay_ms * spec.time_scale / 1000 for delay_ms in accumulate(gaps_ms)]
    inputs = tuple(TimedInput(at, tokens) for at, tokens in zip(at_s, pieces, strict=True))
    return TracedSession(arrival_s, spec.mode, prefix, inputs, closing)


def _refinements(rng: random.Random, total: int, count: int, vocabulary_size: int) -> list[tuple[int, ...]]:
    """Lists of documents: in each a better one enters at a random rank, those below move down, the last drops out.

    The documents above that rank are the prefix that two lists share. The new one is as long as the one that drops
    out, so that every list has `total` tokens.
    """
    documents = [_tokens(rng, size, vocabulary_size) for size in _split(rng, total, min(TOP_K, total))]
    lists = [_joined(documents)]
    for _ in range(count - 1):
        last = documents.pop()
        documents.insert(rng.randint(0, len(documents)), _tokens(rng, len(last), vocabulary_size))
        lists.append(_joined(documents))
    return lists


def _joined(documents: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(token for document in documents for token in document)


def _split(rng: random.Random, total: int, parts: int) -> list[int]:
    """Random sizes, none empty."""
    cuts = sorted(rng.sample(range(1, total), parts - 1))
    return [high - low for low, high in pairwise([0, *cuts, total])]


def _tokens(rng: random.Random, count: int, vocabulary_size: int) -> tuple[int, ...]:
    return tuple(rng.choices(range(vocabulary_size), k=count))
