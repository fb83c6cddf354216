"""Prompts for `rachis bench tiers`: a generated trace of shared prefixes, as token ids.

Every block of the trace has tokens of its own, drawn by its number: two prompts share the tokens of the blocks that
they share in the trace, and behind those the tokens of no whole block.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from cluster_core.errors import InvalidInputError
from cluster_sim.workloads.few_shot import SHAPES, generated
from cluster_sim.workloads.traces import Trace

# As many blocks as prompts share, over the blocks of the device, where nothing else is asked for.
WORKING_SET_FACTOR = 2.5
# A prefill worker answers with one token and then steps on while its blocks wait for a pull. A few tokens give the
# copies such steps too, and a wrong block more places to show.
ANSWER_TOKENS = 4


@dataclass(frozen=True, slots=True)
class TiersWorkload:
    """What the engine is given."""

    # A name of `SHAPES`.
    shape: str
    requests: int = 400
    # Of the requests, have a prompt that no other request has.
    noise_share: float = 0.2
    # Requests in the engine at any time; the next follows when one has ended.
    concurrency: int = 1
    # Of every variant.
    rounds: int = 3
    seed: int = 0

    def trace(self, block_tokens: int) -> Trace:
        """The same for the same arguments. Raises InvalidInputError for what the shape does not have."""
        return generated(
            SHAPES[self.shape], requests=self.requests, noise_share=self.noise_share, block_tokens=block_tokens,
            seed=self.seed,
        )  # fmt: skip


def prompts_of(trace: Trace, vocabulary_size: int, seed: int) -> list[tuple[int, ...]]:
    """Token ids of each request of a trace. Another seed gives other tokens for all blocks."""
    drawn: dict[int, list[int]] = {}

    def tokens(block: int) -> list[int]:
        if block not in drawn:
            rng = random.Random(f"{seed} {block}")
            drawn[block] = rng.choices(range(vocabulary_size), k=trace.block_tokens)
        return drawn[block]

    return [
        tuple(token for block in request.hashes for token in tokens(block))[: request.input_tokens] for request in trace
    ]


def shared_blocks(trace: Trace) -> int:
    """The working set: blocks that more than one prompt has."""
    times = Counter(block for request in trace for block in request.hashes)
    return sum(each > 1 for each in times.values())


def fewest_device_blocks(trace: Trace, concurrency: int) -> int:
    """Enough for the longest prompt and its answer, as often as requests run together."""
    return concurrency * -(-longest_tokens(trace) // trace.block_tokens)


def default_device_blocks(trace: Trace, concurrency: int) -> int:
    """A part of the working set, and no less than the requests need."""
    return max(fewest_device_blocks(trace, concurrency), round(shared_blocks(trace) / WORKING_SET_FACTOR))


def longest_tokens(trace: Trace) -> int:
    """Prompt and answer together."""
    return max(request.input_tokens for request in trace) + ANSWER_TOKENS


def wrong_tokens(expected: Sequence[tuple[int, ...]], answers: Sequence[tuple[int, ...]]) -> int:
    """Places in which answers to the same prompts differ; a missing token is a wrong one."""
    return sum(
        abs(len(right) - len(given)) + sum(one != other for one, other in zip(right, given, strict=False))
        for right, given in zip(expected, answers, strict=True)
    )


def require_model_length(trace: Trace, max_model_len: int) -> None:
    """Raises InvalidInputError where the model is too short for a prompt."""
    if longest_tokens(trace) > max_model_len:
        raise InvalidInputError(
            f"must be at least {longest_tokens(trace)} for {trace.name}, got {max_model_len}",
            field="engine.max_model_len",
        )
