"""One run of Stream2LLM's evaluation: its workload through vLLM's schedulers in simulated time.

TTFT counts from the end of the context, when the session is finished or the whole prompt is sent, as the paper's
figures do: what the retriever takes is not in it.
"""

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from cluster_configs.preemption_costs import CostModel as PreemptionCosts
from cluster_configs.preemption_costs import LatencyCurve
from cluster_core.engine_jobs import SessionMode
from cluster_sim.costs import catalog
from cluster_sim.costs.step_work import CostModel, prefill_work
from cluster_sim.engines.engine import Outcome, OutcomeKind, SimInput, SimJob
from cluster_sim.engines.vllm_engine import VllmSimEngine
from cluster_sim.engines.vllm_schedulers import SchedulerKind, VllmEngineSettings
from cluster_sim.workloads.streaming import GENERATED_TOKENS, TracedSession, WorkloadSpec, draw_sessions
from kv_transfer.claims.claims import no_keys

COST_MODEL = "h200x2-llama-3.1-8b"
# Llama 3.1's; no context is cut.
_MODEL_TOKENS = 131_072
# Small numbers: what tokens are matters for common prefixes alone.
_VOCABULARY = 256
_BLOCK_TOKENS = 16
# Not published; above all concurrency that is (289 requests at the median).
_MAX_RUNNING_REQUESTS = 1024
_TOKEN_BUDGETS: Mapping[SessionMode, int] = {SessionMode.APPEND: 2048, SessionMode.UPDATE: 8192}
_HOST_RATIO = 2
_CURVE_TOKENS = tuple(2**power for power in range(4, 18))


@dataclass(frozen=True, slots=True)
class Variant:
    """How sessions are scheduled."""

    # Of the streaming scheduler; None: whole prompts by vLLM's own scheduler, without streaming.
    policy: str | None
    preemption: str = "cost"


@dataclass(slots=True)
class Run:
    """Figures of one run."""

    # Of each session, ascending.
    ttft_s: list[float] = field(default_factory=list)
    preemptions: int = 0
    # Preemptions to host memory.
    swapped: int = 0
    busy_share: float = 0.0
    busy_s: float = 0.0
    # Of streamed sessions: prompt tokens that steps computed, and those of them that an update threw away.
    computed_tokens: int = 0
    invalidated_tokens: int = 0

    def quantile(self, share: float) -> float:
        return self.ttft_s[min(len(self.ttft_s) - 1, math.ceil(share * len(self.ttft_s)) - 1)]


@cache
def cost_model() -> CostModel:
    return catalog.load(COST_MODEL)


@cache
def preemption_costs() -> PreemptionCosts:
    """What the paper profiles beforehand: here the model's own steps and copies."""
    model = cost_model()
    return PreemptionCosts(
        LatencyCurve({tokens: (1000 * model.step_s(prefill_work([(0, tokens)])),) for tokens in _CURVE_TOKENS}),
        LatencyCurve({tokens: (1000 * model.store_s(tokens),) for tokens in _CURVE_TOKENS}),
        LatencyCurve({tokens: (1000 * model.load_s(tokens),) for tokens in _CURVE_TOKENS}),
    )


def replay(spec: WorkloadSpec, variant: Variant) -> Run:
    """All sessions, until the last has its token. Raises AssertionError when one never gets it."""
    return _Replay(spec, variant).run()


class _Replay:
    def __init__(self, spec: WorkloadSpec, variant: Variant) -> None:
        model = cost_model()
        blocks = model.device_tokens // _BLOCK_TOKENS
        settings = VllmEngineSettings(
            kind=SchedulerKind.PLAIN if variant.policy is None else SchedulerKind.STREAMING,
            block_tokens=_BLOCK_TOKENS,
            device_blocks=blocks,
            host_blocks=_HOST_RATIO * blocks,
            max_running_requests=_MAX_RUNNING_REQUESTS,
            max_batched_tokens=_TOKEN_BUDGETS[spec.mode],
            prefix_caching=False,
            policy=variant.policy or "fcfs",
            preemption=variant.preemption,
            preemption_costs=preemption_costs(),
            # A swapped session comes back before its step, as published.
            tiers=None,
        )
        self._engine = VllmSimEngine(model, settings)
        self._streams = variant.policy is not None
        self._arrivals: Iterator[TracedSession] = draw_sessions(spec, _VOCABULARY, _MODEL_TOKENS)
        # (time, number, which of its inputs): -1 opens the session.
        self._planned: list[tuple[float, int, int]] = []
        self._open: dict[int, TracedSession] = {}
        self._run = Run()
        self._number = 0

    def run(self) -> Run:
        engine = self._engine
        self._plan_arrival()
        while True:
            next_s = engine.next_s()
            if self._planned and self._planned[0][0] <= next_s:
                now_s, number, index = heapq.heappop(self._planned)
                self._happen(number, index, now_s)
            elif next_s < math.inf:
                now_s = next_s
                for outcome in engine.advance(now_s):
                    self._take(outcome)
            else:
                break
        assert not self._open, f"{len(self._open)} sessions never got a token"
        run = self._run
        run.ttft_s.sort()
        run.preemptions = run.preemptions or engine.totals.preemptions
        run.busy_s = engine.totals.busy_s
        run.busy_share = run.busy_s / now_s
        return run

    def _plan_arrival(self) -> None:
        session = next(self._arrivals, None)
        if session is not None:
            self._number += 1
            self._open[self._number] = session
            heapq.heappush(self._planned, (session.arrival_s, self._number, -1))

    def _happen(self, number: int, index: int, now_s: float) -> None:
        session, engine = self._open[number], self._engine
        last = index == len(session.inputs) - 1
        if index < 0:
            self._plan_arrival()
            if self._streams:
                job = SimJob(number, len(session.prompt), no_keys(), GENERATED_TOKENS)
                engine.open(job, _input(session.prefix), session.mode, now_s)
        elif self._streams:
            replaces, closing = session.mode is SessionMode.UPDATE, session.closing if last else ()
            tokens = session.inputs[index].tokens + closing
            engine.take_input(number, _input(tokens, replaces=replaces, is_last=last), now_s)
        else:
            engine.add(SimJob(number, len(session.prompt), no_keys(), GENERATED_TOKENS), now_s)
        if not last:
            following = index + 1 if self._streams else len(session.inputs) - 1
            heapq.heappush(self._planned, (session.inputs[following].at_s, number, following))

    def _take(self, outcome: Outcome) -> None:
        number = outcome.job.number
        if outcome.kind is not OutcomeKind.FINISHED:
            assert outcome.kind is OutcomeKind.FIRST_TOKEN, outcome.kind
            return
        self._run.ttft_s.append(outcome.at_s - self._open.pop(number).finish_s)
        if self._streams:
            record = self._engine.records.pop(number)
            self._run.swapped += record.preemptions_swap
            self._run.preemptions += record.preemptions_swap + record.preemptions_recompute
            self._run.computed_tokens += record.tokens.computed_tokens
            self._run.invalidated_tokens += record.tokens.invalidated_tokens


def _input(tokens: Sequence[int], *, replaces: bool = False, is_last: bool = False) -> SimInput:
    """Without names: prefixes are not cached in these runs, and no prompt is too long."""
    return SimInput(tokens, 0, 0, no_keys(), replaces, is_last)
