"""A deterministic stand-in for an engine, checked by the same contract tests as the real one.

Tokens are a pure function of prompt, seed and position, one lower-case letter each. Engines that share a `fabric`
pull from each other's leases. Nothing sleeps: `hold_before` stops jobs at a position until `resume`. Sessions are in
`tests.fakes.session`.

Who holds the blocks of a job:
    running              the job, in `_running`
    finished, leased     the lease, in `_leases`, until a peer pulls it or it is released
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from cluster_core.clock import unix_ms
from cluster_core.engine_jobs import (
    EngineJob,
    EngineOutput,
    FinishReason,
    HandoffOutcome,
    HandoffReport,
    KvLease,
    SamplingSpec,
    SessionMode,
)
from cluster_core.engine_reports import (
    DecodeBatch,
    EngineCosts,
    EngineCounters,
    EngineInfo,
    EngineLoad,
    EngineStatus,
    HotPrefix,
    PrefixClaimChange,
    PrefixClaims,
)
from cluster_core.errors import InvalidInputError, RachisError, UnavailableError
from fault_sim.blocks.answers import ending, held_back, logprobs
from kv_transfer.handoff.lease_params import decode_params, encode_params
from kv_transfer.handoff.rules import is_late, stamp_deadline
from tests.fakes.claims import FakeClaims
from tests.fakes.decode import FakeDecode
from tests.fakes.session import FakeRun, FakeSession
from tests.fakes.tiers import FakeTiers

KV_BYTES_PER_TOKEN = 64


def token_at(prompt: tuple[int, ...], sampling: SamplingSpec, position: int) -> int:
    """The token that every fake engine generates there: the code of a lower-case letter."""
    seed = sampling.seed if sampling.temperature else None
    digest = hashlib.blake2b(repr((prompt, seed, position)).encode(), digest_size=8).digest()
    return ord("a") + int.from_bytes(digest) % 26


def expected_text(prompt: tuple[int, ...], sampling: SamplingSpec) -> str:
    """What one engine alone generates up to max_tokens, stop strings aside."""
    return "".join(chr(token_at(prompt, sampling, position)) for position in range(sampling.max_tokens))


@dataclass(frozen=True, slots=True)
class FakeSettings:
    """What a fake engine is like."""

    blocks: int = 1024
    block_size_tokens: int = 4
    max_model_len: int = 4096
    # Of the hand-offs that it leases.
    deadline_s: float = 15.0
    has_tiers: bool = True
    forms_batches: bool = False
    # What its claims are named by.
    chunk_tokens: int = 128
    service_id: str = ""


class FakeEngine:
    """See `cluster_core.engine.Engine`. Usable without `start`.

    `jobs` holds every job it was ever given, a session's once it is finished; `sessions` every session.
    """

    def __init__(self, name: str = "fake", fabric: "dict[str, FakeEngine] | None" = None, **settings: Any) -> None:
        """settings: see `FakeSettings`."""
        given = FakeSettings(**settings)
        self.name = name
        self.jobs: list[EngineJob] = []
        self.sessions: list[FakeSession] = []
        self.held = asyncio.Event()
        self.inputs_held = False
        self.max_model_len = given.max_model_len
        self.claims = FakeClaims(given.block_size_tokens, given.chunk_tokens, given.service_id)
        self.costs = EngineCosts()
        self._fabric = fabric if fabric is not None else {}
        self._fabric[name] = self
        self._blocks = given.blocks
        self._block_size_tokens = given.block_size_tokens
        self._deadline_s = given.deadline_s
        self._running: dict[str, FakeRun] = {}
        self._leases: dict[str, int] = {}
        self._hold_at: int | None = None
        self._budget: int | None = None
        self._dead: str | None = None
        self.counters = EngineCounters()
        self._tiers = FakeTiers(given.blocks, given.block_size_tokens) if given.has_tiers else None
        self._decode = FakeDecode() if given.forms_batches else None

    async def start(self, on_phase: Callable[[str], None], on_death: Callable[[str], None]) -> EngineInfo:
        on_phase("serving")
        return EngineInfo(self.name, self.name, 256, self.max_model_len, self._block_size_tokens, 64, "float32")

    async def generate(self, job: EngineJob) -> AsyncIterator[EngineOutput]:
        run = self._admit(job.request_id, job.token_ids, job.sampling.max_tokens)
        async with aclosing(self.run_job(job, run)) as outputs:  # type: ignore[type-var]
            output: EngineOutput
            async for output in outputs:
                yield output

    def open_session(self, job: EngineJob, mode: SessionMode) -> FakeSession:
        run = self._admit(job.request_id, job.token_ids, job.sampling.max_tokens, may_be_empty=True)
        session = FakeSession(self, job, mode, run)
        self.sessions.append(session)
        return session

    async def run_job(self, job: EngineJob, run: FakeRun) -> AsyncIterator[EngineOutput]:
        """Generates; what runs under the job's name has been admitted."""
        self.jobs.append(job)
        self.counters.requests += 1
        self.counters.prompt_tokens += len(job.token_ids)
        if self._decode is not None:
            self._decode.joined(job)
        try:
            report = self._pull(job.pull)
            text, sent = "", len(job.first.sent_text) if job.first else 0
            for position in range(job.sampling.max_tokens):
                await self._step(run, position)
                if self._decode is not None:
                    self._decode.stepped()
                replayed = job.first is not None and position == 0
                token = (
                    job.first.token_id if job.first and replayed else token_at(job.token_ids, job.sampling, position)
                )
                text += chr(token)
                text, reason = ending(text, token, position, job.sampling)
                shown = max(sent, len(text) if reason else len(text) - held_back(job.sampling))
                if reason is not None:
                    self._finished(job)
                tokens = () if replayed else (token,)
                self.counters.generated_tokens += len(tokens)
                yield EngineOutput(
                    token_ids=tokens,
                    text=text[sent:shown],
                    logprobs=logprobs(tokens, job.sampling.logprobs),
                    finish_reason=reason,
                    handoff=report if position == 0 else None,
                    lease=self._lease(job, run) if job.hand_off and reason is FinishReason.LENGTH else None,
                )
                sent = shown
                if reason is not None:
                    return
        finally:
            if self._decode is not None:
                self._decode.left(job)
            self.forget(job.request_id, run)

    async def release(self, lease_id: str) -> bool:
        await asyncio.sleep(0)
        if lease_id in self._running:
            self._end(self._running[lease_id], UnavailableError("the request was released"))
            return True
        released = self._leases.pop(lease_id, None) is not None
        self.counters.handoffs_released += released
        return released

    def status(self) -> EngineStatus:
        used = sum(self._leases.values()) + sum(run.blocks for run in self._running.values())
        load = EngineLoad(len(self._running), 0, len(self._leases), self._blocks - used, self._blocks)
        tiers = self._tiers.report() if self._tiers is not None else None
        decode = self._decode.report() if self._decode is not None else None
        return EngineStatus(load, replace(self.counters), tiers, decode, self.costs)

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

    async def stop(self) -> None:
        self.die("stopped")

    # What tests do to it.

    def hold_before(self, position: int) -> None:
        """Jobs wait before they generate the token of that position; `held` is set once one does."""
        self._hold_at = position
        self.held.clear()

    def compute_at_most(self, tokens: int) -> None:
        """Sessions compute so many prompt tokens from now on, then wait for more or for `resume`."""
        self._budget = tokens
        self._wake_all()

    def hold_inputs(self) -> None:
        """Sessions take in nothing until `resume`."""
        self.inputs_held = True

    def resume(self) -> None:
        self._hold_at = self._budget = None
        self.inputs_held = False
        self._wake_all()

    def _wake_all(self) -> None:
        for run in self._running.values():
            run.wake.set()

    def die(self, why: str) -> None:
        self._dead = why
        for run in self._running.values():
            self._end(run, UnavailableError(f"the engine died: {why}"))

    # What its sessions ask of it.

    def blocks_of(self, tokens: int) -> int:
        return -(-tokens // self._block_size_tokens)

    def take_budget(self, tokens: int) -> int:
        """How many of so many prompt tokens may be computed now."""
        if self._budget is None:
            return tokens
        taken = min(tokens, self._budget)
        self._budget -= taken
        return taken

    def forget(self, request_id: str, run: FakeRun) -> None:
        """What ran under that name holds nothing any more."""
        if self._running.get(request_id) is run:
            del self._running[request_id]

    def _admit(
        self, request_id: str, prompt: tuple[int, ...], max_tokens: int, *, may_be_empty: bool = False
    ) -> FakeRun:
        if self._dead is not None:
            raise UnavailableError(f"the engine died: {self._dead}")
        if request_id in self._running or request_id in self._leases:
            raise InvalidInputError("is already running", field="request_id")
        if not (prompt or may_be_empty) or len(prompt) >= self.max_model_len:
            raise InvalidInputError(f"the prompt has {len(prompt)} tokens", field="request")
        run = self._running[request_id] = FakeRun(self.blocks_of(len(prompt) + max_tokens))
        return run

    def _pull(self, lease: KvLease | None) -> HandoffReport | None:
        if lease is None:
            return None
        params = decode_params(lease.connector_params)
        peer = self._fabric.get(params["engine"])
        late = is_late(lease.deadline_unix_ms, unix_ms())
        if peer is None or late or peer._leases.pop(lease.lease_id, None) is None:
            self.counters.handoffs_recomputed += 1
            return HandoffReport(HandoffOutcome.RECOMPUTED)
        kv_bytes = params["tokens"] * KV_BYTES_PER_TOKEN
        self.counters.handoffs_pulled += 1
        self.counters.kv_bytes_pulled += kv_bytes
        return HandoffReport(HandoffOutcome.PULLED, kv_bytes, params["tokens"], 0.5)

    def _finished(self, job: EngineJob) -> None:
        """Its prompt is cached from now on. What it cost is made up, as everything here."""
        if self._tiers is not None:
            self._tiers.prefilled(job.token_ids)
        stored = self.claims.cache(job.token_ids, job.cache_salt)
        self.counters.stored_blocks += stored
        self.counters.cacheable_requests += stored > 0
        self.costs = replace(self.costs, prefill_s_per_token=self.costs.prefill_s_per_token or 1e-4)
        if job.sampling.max_tokens > 1:
            self.costs = replace(self.costs, decode_step_s=self.costs.decode_step_s or 1e-3)

    async def _step(self, run: FakeRun, position: int) -> None:
        await asyncio.sleep(0)
        while self._hold_at is not None and position >= self._hold_at and run.ended_by is None:
            run.wake.clear()
            self.held.set()
            await run.wake.wait()
        if run.ended_by is not None:
            raise run.ended_by

    def _lease(self, job: EngineJob, run: FakeRun) -> KvLease:
        self._leases[job.request_id] = run.blocks
        del self._running[job.request_id]
        self.counters.handoffs_leased += 1
        params = encode_params({"engine": self.name, "tokens": len(job.token_ids)})
        return KvLease(job.request_id, params, stamp_deadline(unix_ms(), self._deadline_s))

    def _end(self, run: FakeRun, error: RachisError) -> None:
        run.ended_by = error
        run.wake.set()
