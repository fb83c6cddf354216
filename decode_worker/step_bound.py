"""How many prompt tokens a step computes beside running decodes: what their TPOT objective leaves, but for some cases.

Pure. The bound is on seconds, by what steps of an engine cost, so that it is right on every GPU and for every length of
prompt: the service's engines measure it, the simulator's light engine has a cost model. It yields:
    a first token would be late at this pace      as far as that prompt needs, and as those that decode have time to
                                                  spare (`spare_s`)
    blocks are so short that decodes may take     a prompt that has begun is finished at once: else what was computed
    those that a prompt in its middle needs       of it may be lost to a decode, and be computed again
    not even one block of tokens fits             one is computed: no prompt waits for ever
Source: docs/decisions/0062 and 0073.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from math import inf

from cluster_core.engine_reports import EngineCosts

# Of the TPOT objective, that a step may take: the rest is for what happens between two steps.
ALPHA = 0.95
# Of those that decode, the share that has no say in how far a bound yields: what one of ten has lost already, to a slow
# pull or by being preempted, holds back nobody. Of fewer than ten each has a say.
_FORGONE = 0.1


class Limit(Enum):
    """What has decided how many prompt tokens a step computes."""

    # All that there is to compute, or all that a step can.
    WORK = "work"
    TPOT = "tpot"
    TTFT = "ttft"
    MEMORY = "memory"
    PROGRESS = "progress"


@dataclass(frozen=True, slots=True)
class PromptWork:
    """A prompt that could be computed in this step.

    due_s: in how many seconds its first token will be late, negative where it is; infinite where no client waits for a
    first token of it.
    """

    computed_tokens: int
    left_tokens: int
    due_s: float = inf


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prompt tokens of one step."""

    tokens: int
    limit: Limit


@dataclass(frozen=True, slots=True)
class StepRoom:
    """What one step has for prompts. most_tokens: of its budget, what decodes leave. begun_tokens: what is left of
    prompts that hold blocks; is_short: decodes may take the blocks that those need."""

    most_tokens: int
    block_tokens: int
    begun_tokens: int = 0
    is_short: bool = False


def step_s(costs: EngineCosts, prompts: Sequence[PromptWork], tokens: int) -> float:
    """Seconds of a step that decodes, and computes so many tokens of these prompts, one after the other."""
    seconds = costs.decode_step_s + (costs.prefill_s if tokens else 0.0)
    for prompt in prompts:
        part = min(tokens, prompt.left_tokens)
        if not part:
            break
        pairs = part * (prompt.computed_tokens + part / 2)
        seconds += part * costs.prefill_s_per_token + pairs * costs.prefill_s_per_pair
        tokens -= part
    return seconds


def spare_s(each_s: Iterable[float]) -> float:
    """What nine of ten that decode have to spare, of fewer all: by how many seconds a step may be longer than its
    bound, once, and their TPOT so far be kept. each_s: of each, how long its tokens since the first one might have
    taken by its objective, less what they took."""
    spare = sorted(each_s)
    return max(0.0, spare[int(_FORGONE * len(spare))]) if spare else inf


def bounded_chunk(
    prompts: Sequence[PromptWork],
    seconds: Callable[[int], float],
    bound_s: float,
    room: StepRoom,
    spare: float = inf,
) -> Chunk:
    """Beside decodes that bear steps of `bound_s`. prompts: in the order in which they will be computed. seconds: of a
    step with so many tokens of them, such as `step_s`. spare: seconds by which a first token may make it longer."""
    most = min(room.most_tokens, sum(prompt.left_tokens for prompt in prompts))
    chunk = Chunk(largest_chunk(seconds, most, bound_s), Limit.TPOT)
    if chunk.tokens == most:
        return Chunk(most, Limit.WORK)
    least = min(room.block_tokens, most)
    if chunk.tokens < least:
        chunk = Chunk(least, Limit.PROGRESS)
    if room.is_short and min(room.begun_tokens, most) > chunk.tokens:
        chunk = Chunk(min(room.begun_tokens, most), Limit.MEMORY)
    needed = _chunk_in_time(prompts, seconds, chunk.tokens, most)
    if needed > chunk.tokens:
        needed = largest_chunk(seconds, needed, bound_s + spare)
    return Chunk(needed, Limit.TTFT) if needed > chunk.tokens else chunk


def largest_chunk(seconds: Callable[[int], float], most_tokens: int, bound_s: float) -> int:
    """The largest number of prompt tokens, up to `most_tokens`, with which a step takes `bound_s` at most.

    seconds: of a step with so many tokens, never fewer for more of them. 0: not even one token fits.
    """
    return bisect_right(range(1, most_tokens + 1), bound_s, key=seconds)


def _chunk_in_time(prompts: Sequence[PromptWork], seconds: Callable[[int], float], least: int, most: int) -> int:
    """The smallest chunk of at least `least` with which no first token is late, if steps go on as this one; `most`
    where there is none."""

    def is_in_time(tokens: int) -> bool:
        each_s, ahead = seconds(tokens), 0
        for prompt in prompts:
            ahead += prompt.left_tokens
            if max(1.0, ahead / tokens) * each_s > prompt.due_s:
                return False
        return True

    if is_in_time(least):
        return least
    return least + bisect_left(range(least, most), True, key=is_in_time)
