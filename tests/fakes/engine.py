"""The block engine of the fault simulator, as tests of what lies around an engine need it.

It works without `start`, takes no time, and stops where a test wants it: `hold_before`, `compute_at_most` and
`hold_inputs`, until `resume`. Claims, tiers and the decode batch are those that a test has asked for; its own cache is
not told of. Engines of one fabric pull from each other's leases.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from cluster_core.clock import monotonic_s
from cluster_core.engine_jobs import EngineJob, FinishReason, KvLease, SamplingSpec, SessionMode
from cluster_core.engine_reports import (
    DecodeBatch,
    EngineCosts,
    EngineStatus,
    HotPrefix,
    PrefixClaimChange,
    PrefixClaims,
)
from cluster_core.heartbeat import LEAST_S
from fault_sim.blocks.engine import BlockEngine
from fault_sim.blocks.fabric import BlockEngineSettings, Fabric
from fault_sim.blocks.gate import Gate
from fault_sim.blocks.pool import expected_tokens
from fault_sim.blocks.run import Run
from fault_sim.blocks.session import BlockSession
from fault_sim.network import Network
from tests.fakes.claims import FakeClaims
from tests.fakes.decode import FakeDecode
from tests.fakes.tiers import FakeTiers

# Neither steps nor pulls take time, and no lease expires.
_INSTANT = {"step_s": 0.0, "token_s": 0.0, "pull_s": 0.0, "pull_token_s": 0.0, "deadline_s": 15.0, "lease_s": 3600.0}
_NEVER_BACK_S = 3600.0


def fabric() -> Fabric:
    """Of engines that pull from each other, over links without latency."""
    return Fabric(Network(Random(0), latency_s=0.0))


def expected_text(prompt: tuple[int, ...], sampling: SamplingSpec, scope: str = "") -> str:
    """What one engine alone generates up to max_tokens, stop strings aside."""
    return "".join(map(chr, expected_tokens(prompt, sampling, scope)))


class HoldingGate(Gate):
    """Holds what a test says. held: set once a job waits before its next token."""

    def __init__(self) -> None:
        self.held = asyncio.Event()
        # Of the answer's tokens, the first that waits.
        self.hold_at: int | None = None
        # Prompt tokens that sessions may compute.
        self.budget: int | None = None
        self.inputs_held = False
        # Since when.
        self._holds_since_s = 0.0

    @property
    def stalled_s(self) -> float:
        """A held engine is one whose step does not end."""
        holds_s = monotonic_s() - self._holds_since_s if self.hold_at is not None and self.held.is_set() else 0.0
        return holds_s if holds_s > LEAST_S else 0.0

    def allows(self, run: Run, tokens: int) -> int:
        if self.budget is not None and run.session is not None:
            tokens = min(tokens, self.budget)
            self.budget -= tokens
        position = len(run.tokens) - run.prompt_tokens
        if self.hold_at is None or position < self.hold_at:
            return tokens
        if not run.is_open and run.computed + tokens == len(run.tokens):
            # With the last of its tokens comes the next one.
            tokens -= 1
            if not tokens and not self.held.is_set():
                self._holds_since_s = monotonic_s()
                self.held.set()
        return tokens

    def takes_input(self, run: Run) -> bool:
        return not self.inputs_held


class FakeEngine(BlockEngine):
    """settings: those of `BlockEngineSettings` that are others than a test's usual ones.

    `jobs` holds every job it was ever given, a session's once it is finished; `sessions` every session.
    """

    def __init__(
        self,
        name: str = "fake",
        fabric_of_it: Fabric | None = None,
        *,
        has_tiers: bool = True,
        forms_batches: bool = False,
        **settings: Any,
    ) -> None:
        self._holds = HoldingGate()
        made = BlockEngineSettings(**{**_INSTANT, **settings})
        super().__init__(name, name, fabric_of_it or fabric(), made, gate=self._holds)
        self.jobs: list[EngineJob] = []
        self.sessions: list[BlockSession] = []
        self.claims = FakeClaims(made.block_tokens, made.chunk_tokens, made.service_id)
        self._stored_blocks = 0
        self._tiers = FakeTiers(made.blocks, made.block_tokens) if has_tiers else None
        self._decode = FakeDecode() if forms_batches else None

    @property
    def costs(self) -> EngineCosts:
        """As a test has set them, or made up."""
        return self._costs

    @costs.setter
    def costs(self, costs: EngineCosts) -> None:
        self._costs = costs

    @property
    def is_dead(self) -> bool:
        """A dead engine gives nothing back, leases least of all: its worker's process ends with all that it holds."""
        return self._dead is not None

    @property
    def held(self) -> asyncio.Event:
        return self._holds.held

    def open_session(self, job: EngineJob, mode: SessionMode) -> BlockSession:
        session = super().open_session(job, mode)
        self.sessions.append(session)
        return session

    def leave(self, run: Run) -> None:
        if self._decode is not None:
            self._decode.left(run.job)
        super().leave(run)

    def status(self) -> EngineStatus:
        status = super().status()
        return replace(
            status,
            # The process of an engine that is dead would not answer; this one does.
            load=replace(status.load, stalled_s=_NEVER_BACK_S if self.is_dead else self._holds.stalled_s),
            counters=replace(status.counters, stored_blocks=self._stored_blocks),
            tiers=self._tiers.report() if self._tiers is not None else None,
            decode=self._decode.report() if self._decode is not None else None,
        )

    async def hottest_prefixes(self, at_most: int) -> Sequence[HotPrefix]:
        await asyncio.sleep(0)
        return self._tiers.hottest(at_most) if self._tiers is not None else ()

    async def decode_batch(self, at_most: int) -> DecodeBatch:
        await asyncio.sleep(0)
        return self._decode.batch(at_most) if self._decode is not None else DecodeBatch()

    def follow_claims(self, on_change: Callable[[PrefixClaimChange], None]) -> None:
        self.claims.follow(on_change)

    async def prefix_claims(self, on_look: Callable[[], None] = lambda: None) -> PrefixClaims:
        await asyncio.sleep(0)
        on_look()
        return self.claims.audit() if self._dead is None else PrefixClaims()

    # What tests do to it.

    def hold_before(self, position: int) -> None:
        """Jobs wait before they generate the token of that position; `held` is set once one does."""
        self._holds.hold_at = position
        self._holds.held.clear()

    def compute_at_most(self, tokens: int) -> None:
        """Sessions compute so many prompt tokens from now on, then wait for more or for `resume`."""
        self._holds.budget = tokens
        self.wake()

    def hold_inputs(self) -> None:
        """Sessions take in nothing until `resume`."""
        self._holds.inputs_held = True

    def resume(self) -> None:
        self._holds.hold_at = self._holds.budget = None
        self._holds.inputs_held = False
        self.wake()

    # What it does beside.

    def _admit(self, job: EngineJob, *, may_be_empty: bool = False) -> Run:
        run = super()._admit(job, may_be_empty=may_be_empty)
        self._begin_stepping()
        if not may_be_empty:
            self._begun(job)
        return run

    def _begun(self, job: EngineJob) -> None:
        self.jobs.append(job)
        if self._decode is not None:
            self._decode.joined(job)

    async def _between_steps(self, command: Callable[[], Any]) -> Any:
        if self._dead is None:
            self._begin_stepping()
        return await super()._between_steps(command)

    def _generate(self, run: Run) -> None:
        if run.session is not None and not run.is_started:
            self._begun(replace(run.job, token_ids=tuple(run.tokens[: run.prompt_tokens])))
        if self._decode is not None:
            self._decode.stepped()
        super()._generate(run)

    def _end(self, run: Run, reason: FinishReason) -> KvLease | None:
        """Its prompt is cached from now on. What it cost is made up."""
        prompt, cacheable = tuple(run.tokens[: run.prompt_tokens]), self._counters.cacheable_requests
        if self._tiers is not None:
            self._tiers.prefilled(prompt)
        adapter = run.job.adapter.digest if run.job.adapter is not None else ""
        stored = self.claims.cache(prompt, run.job.cache_salt, adapter=adapter)
        self._stored_blocks += stored
        self._costs = replace(self._costs, prefill_s_per_token=self._costs.prefill_s_per_token or 1e-4)
        if run.job.sampling.max_tokens > 1:
            self._costs = replace(self._costs, decode_step_s=self._costs.decode_step_s or 1e-3)
        lease = super()._end(run, reason)
        self._counters.cacheable_requests = cacheable + (stored > 0)
        return lease

    def _measure(self, took_s: float, tokens: int, runs: int) -> None:
        """Its steps take no time."""

    def _publish_claims(self) -> None:
        """`claims` has what it is to be known for."""
