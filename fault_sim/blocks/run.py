"""What a job or a session is to a `BlockEngine`, and what of its tokens may be shown. Pure."""

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

from cluster_core.engine_jobs import EngineJob, EngineOutput, HandoffReport, SessionRecord
from fault_sim.blocks.answers import ending, held_back, logprobs
from fault_sim.blocks.pool import BlockHash


class RunSession(Protocol):
    """What the engine does to the session of a run, between two steps."""

    def take_in(self) -> bool:
        """Takes in the input that has come; whether there was any."""
        ...

    def computed(self, tokens: int, *, cached: int = 0) -> None:
        """So much more of the prompt lies in blocks."""
        ...

    def preempted(self) -> None:
        """Its blocks were taken."""
        ...

    def fail(self, error: Exception) -> None:
        """The engine answers nothing more."""
        ...

    def record(self) -> SessionRecord:
        """What has happened to it so far."""
        ...


@dataclass(slots=True, eq=False)
class Run:
    """A job, or a session, in the engine."""

    job: EngineJob
    # The prompt and what was generated.
    tokens: list[int]
    prompt_tokens: int
    blocks: list[int] = field(default_factory=list)
    # Tokens whose KV lies in `blocks`.
    computed: int = 0
    # Of its full blocks, as far as they were needed.
    names: list[BlockHash] = field(default_factory=list)
    # What the last KV of each full block should be.
    right: list[bytes] = field(default_factory=list)
    session: RunSession | None = None
    # Its prompt may still change, so its last token is not computed.
    is_open: bool = False
    # Its prompt is to be pulled by `pull_until_s`, which was not tried yet.
    pulls: bool = False
    # It is being pulled, and the blocks are not used until the pull has ended.
    pulling: bool = False
    pull_until_s: float | None = None
    # Its caller has gone.
    abandoned: bool = False
    # Its caller has the last output.
    taken: bool = False
    # It has published blocks that were not cached before.
    has_published: bool = False
    report: HandoffReport | None = None
    cached_tokens: int = 0
    is_started: bool = False
    # Of its generator.
    draws: int = 0
    text: str = ""
    # Characters of the text that its caller has.
    shown: int = 0
    outputs: "asyncio.Queue[EngineOutput | Exception]" = field(default_factory=asyncio.Queue)

    @property
    def wanted(self) -> int:
        """Tokens whose KV may be computed now."""
        return max(0, len(self.tokens) - 1) if self.is_open else len(self.tokens)

    def generated(self, token: int) -> EngineOutput:
        """The next token of its answer is this one; returns what its caller gets of it."""
        position = len(self.tokens) - self.prompt_tokens
        sampling = self.job.sampling
        self.tokens.append(token)
        self.text, reason = ending(self.text + chr(token), token, position, sampling)
        shown = max(self.shown, len(self.text) if reason else len(self.text) - held_back(sampling))
        text, self.shown = self.text[self.shown : shown], shown
        is_first, self.is_started = not self.is_started, True
        return EngineOutput(
            token_ids=(token,),
            text=text,
            logprobs=logprobs((token,), sampling.logprobs),
            prompt_logprobs=(
                logprobs(self.job.token_ids[1:], sampling.prompt_logprobs)
                if is_first and self.job.emitted is None
                else ()
            ),
            finish_reason=reason,
            handoff=self.report if is_first else None,
            cached_tokens=self.cached_tokens if is_first else 0,
        )
