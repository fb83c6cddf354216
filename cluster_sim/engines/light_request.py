"""A job in the light engine: where it stands, what it holds and what is left of it."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

from cluster_sim.engines.engine import SimInput, SimJob
from kv_transfer.blocks import BlockHash
from kv_transfer.tiers.prefix_runs import Match

# Of the tokens of any prompt.
ALL = 1 << 62


class At(Enum):
    """Where a request stands."""

    WAITING = auto()
    PULLING = auto()
    LOADING = auto()
    PREFILLING = auto()
    DECODING = auto()
    HELD = auto()


@dataclass(slots=True, eq=False)
class LightRequest:
    """One job in the engine."""

    job: SimJob
    hashes: list[BlockHash]
    # Of its prompt, what may be computed now; not all of it while a session is open.
    known: int
    # Of what has been computed, how much still stands.
    kept: int = ALL
    at: At = At.WAITING
    # Its cached blocks and its own, from admission on.
    match: Match = field(default_factory=lambda: Match([], []))
    blocks: list[int] = field(default_factory=list)
    cached: int = 0
    # Prompt tokens that are there; while it waits, those that were cached when it came.
    computed: int = 0
    # Tokens still to generate.
    left: int = 0
    # When it came to this engine, and when it had its first token.
    entered_s: float = 0.0
    first_s: float = 0.0
    # When it began to wait for its pull.
    since_s: float = 0.0

    @property
    def context(self) -> int:
        return self.job.prompt_tokens + self.job.output_tokens - self.left

    @property
    def prompt_blocks(self) -> list[int]:
        return self.held[: len(self.hashes)]

    @property
    def held(self) -> list[int]:
        return [*self.match.device, *self.blocks]


def computable(job: SimJob, last: SimInput) -> int:
    """Of the prompt as it stands. While more may come, the last token is held back: none is sampled after it."""
    return job.prompt_tokens if last.is_last else max(0, min(last.prompt_tokens, job.prompt_tokens) - 1)


def place_in(queue: Collection[LightRequest], request: LightRequest, *, pulled_first: bool) -> int:
    """At the end of a queue; pulled_first: of a request whose KV is pulled, before all that compute their prompts."""
    return sum(each.job.pulls for each in queue) if pulled_first and request.job.pulls else len(queue)


def chunks(prompts: Iterable[LightRequest], budget: int) -> tuple[tuple[LightRequest, int], ...]:
    """Of these in their order, so many tokens."""
    found = []
    for request in prompts:
        if not budget:
            break
        tokens = min(budget, request.known - request.computed)
        if tokens > 0:
            found.append((request, tokens))
            budget -= tokens
    return tuple(found)
