"""Traces drawn with the shape of few-shot benchmarks: questions behind the worked examples of their group."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count, islice

from cluster_core.errors import InvalidInputError
from cluster_sim.workloads.traces import Trace, TraceRequest, require_positive


@dataclass(frozen=True, slots=True)
class FewShotShape:
    """A benchmark whose questions are asked behind the worked examples of their group.

    queries: of each group. input_tokens_mean: of a prompt, examples and question together.
    """

    name: str
    queries: tuple[int, ...]
    input_tokens_mean: int
    shots: int
    chain_of_thought: bool = False

    @property
    def question_tokens_mean(self) -> float:
        """Assumed: a worked example is as long as a question, and twice as long where it has a chain of thought."""
        return self.input_tokens_mean / (self.shots * (2 if self.chain_of_thought else 1) + 1)

    @property
    def examples_tokens_mean(self) -> float:
        return self.input_tokens_mean - self.question_tokens_mean


# HotPrefix (doi 10.1145/3749168), section 5.1, has the mean lengths, the shots of the first two, and one output token
# for MMLU. Its introduction exchanges the lengths of MMLU and BBH. Groups and queries are those of the public test sets
# (Hellaswag: validation). Assumed: 3 shots for BBH and 5 for CEVAL, as their authors ask; subjects of CEVAL of equal
# size; one group for Hellaswag, which has no subjects.
SHAPES: Mapping[str, FewShotShape] = {
    shape.name: shape
    for shape in (
        FewShotShape(
            "mmlu", (
                100, 135, 152, 100, 265, 144, 100, 100, 100, 173, 102, 100, 235, 114, 145, 378, 126, 100, 310, 203,
                100, 165, 198, 193, 390, 270, 238, 151, 545, 216, 204, 237, 223, 131, 121, 108, 163, 112, 103, 234,
                100, 783, 346, 895, 306, 311, 324, 282, 1534, 272, 612, 110, 245, 201, 100, 166, 171,
            ), 567, shots=5,
        ),
        FewShotShape("hellaswag", (10_042,), 753, shots=10),
        FewShotShape("bbh", (250,) * 24 + (187, 178, 146), 723, shots=3, chain_of_thought=True),
        FewShotShape("ceval", (238,) * 18 + (237,) * 34, 1673, shots=5, chain_of_thought=True),
    )
}  # fmt: skip

# Assumed: lengths lie evenly between these parts of their mean.
_SPREAD = (0.5, 1.5)


def generated(
    shape: FewShotShape,
    *,
    requests: int | None = None,
    noise_share: float = 0.0,
    requests_per_s: float = 10.0,
    block_tokens: int = 16,
    seed: int = 0,
) -> Trace:
    """The queries of a shape, shuffled as in HotPrefix: all, or the first so many. Depends on its arguments alone.

    Each is the examples of its group and a question of its own; only full blocks of examples are shared, and groups
    share nothing. noise_share: of all requests, have a prompt of the same mean length that no other has. Assumed,
    where the paper sends batches: Poisson arrivals, and a chain of thought of output as long as the question.
    Raises InvalidInputError for arguments that cannot be, and for more queries than the shape has.
    """
    total = sum(shape.queries) if requests is None else requests
    require_positive("requests", total)
    require_positive("requests_per_s", requests_per_s)
    require_positive("block_tokens", block_tokens)
    if not 0 <= noise_share <= 1:
        raise InvalidInputError(f"must be from 0 to 1, got {noise_share}", field="noise_share")
    noise = round(total * noise_share)
    if total - noise > sum(shape.queries):
        raise InvalidInputError(f"{shape.name} has {sum(shape.queries)} queries, not {total - noise}", field="requests")
    rng = random.Random(seed)
    fresh = count()
    examples = [(tokens, tuple(islice(fresh, tokens // block_tokens))) for tokens in _examples_tokens(rng, shape)]
    queries = [group for group, size in enumerate(shape.queries) for _ in range(size)]
    rng.shuffle(queries)
    order: list[int | None] = [*queries[: total - noise], *[None] * noise]
    rng.shuffle(order)

    drawn: list[TraceRequest] = []
    arrival_s = 0.0
    for group in order:
        question_tokens = max(1, round(shape.question_tokens_mean * rng.uniform(*_SPREAD)))
        examples_tokens, shared = (_noise_tokens(rng, shape), ()) if group is None else examples[group]
        input_tokens = examples_tokens + question_tokens
        own = islice(fresh, -(-input_tokens // block_tokens) - len(shared))
        output_tokens = question_tokens if shape.chain_of_thought else 1
        drawn.append(TraceRequest(arrival_s, input_tokens, output_tokens, (*shared, *own)))
        arrival_s += rng.expovariate(requests_per_s)
    return Trace(shape.name, block_tokens, tuple(drawn))


def _noise_tokens(rng: random.Random, shape: FewShotShape) -> int:
    """Of a one-off prompt, in place of the examples."""
    return round(shape.examples_tokens_mean * rng.uniform(*_SPREAD))


def _examples_tokens(rng: random.Random, shape: FewShotShape) -> list[int]:
    """Of each group, scaled so that the mean over all queries is the shape's, however they fall among the groups."""
    factors = [rng.uniform(*_SPREAD) for _ in shape.queries]
    mean = sum(factor * size for factor, size in zip(factors, shape.queries, strict=True)) / sum(shape.queries)
    return [round(shape.examples_tokens_mean * factor / mean) for factor in factors]
