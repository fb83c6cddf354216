"""What a job or a session is to a `block_engine.BlockEngine`, and what of its tokens may be shown. Pure."""

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cluster_core.engine_jobs import EngineJob, EngineOutput, HandoffReport
from fault_sim.answers import ending, held_back, logprobs

if TYPE_CHECKING:
    from fault_sim.block_pool import BlockHash
    from fault_sim.block_session import BlockSession


@dataclass(slots=True, eq=False)
class Run:
    """tokens: the prompt and what was generated. computed: tokens whose KV lies in `blocks`. names: of its full blocks,
    as far as they were needed. right: what the last KV of each should be. is_open: its prompt may still change, so its
    last token is not computed.

    pulls: its prompt is to be pulled by `pull_until_s`, which was not tried yet. pulling: it is, and the blocks are not
    used until then. abandoned: nobody waits for it any more. has_published: blocks that nobody else had.
    """

    job: EngineJob
    tokens: list[int]
    prompt_tokens: int
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    names: "list[BlockHash]" = field(default_factory=list)
    right: list[bytes] = field(default_factory=list)
    session: "BlockSession | None" = None
    is_open: bool = False
    pulls: bool = False
    pulling: bool = False
    pull_until_s: float | None = None
    abandoned: bool = False
    has_published: bool = False
    report: HandoffReport | None = None
    cached_tokens: int = 0
    is_started: bool = False
    text: str = ""
    shown: int = 0
    outputs: "asyncio.Queue[EngineOutput | Exception]" = field(default_factory=asyncio.Queue)

    @property
    def wanted(self) -> int:
        """Tokens whose KV may be computed now."""
        return max(0, len(self.tokens) - 1) if self.is_open else len(self.tokens)

    def generated(self, token: int) -> EngineOutput:
        """The next token of its answer is this one; what its caller is told of it."""
        position = len(self.tokens) - self.prompt_tokens
        sampling, first = self.job.sampling, self.job.first
        is_replayed = first is not None and position == 0
        if first is not None and position == 0:
            token, self.shown = first.token_id, len(first.sent_text)
        self.tokens.append(token)
        self.text, reason = ending(self.text + chr(token), token, position, sampling)
        shown = max(self.shown, len(self.text) if reason else len(self.text) - held_back(sampling))
        text, self.shown = self.text[self.shown : shown], shown
        tokens = () if is_replayed else (token,)
        is_first, self.is_started = not self.is_started, True
        return EngineOutput(
            token_ids=tokens,
            text=text,
            logprobs=logprobs(tokens, sampling.logprobs),
            finish_reason=reason,
            handoff=self.report if is_first else None,
            cached_tokens=self.cached_tokens if is_first else 0,
        )
