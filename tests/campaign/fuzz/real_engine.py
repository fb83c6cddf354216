"""Random sessions through one real engine in fp32, against fresh requests with the final prompt.

The engine is one of prefill or one that does both: then whole requests decode beside the sessions, and
steps are bounded.
The engine is stepped by hand. Each answer is compared twice: with that of a fresh request that reads no cache, and with
that of one that may hit whatever the sessions have published. Tokens must be the same, and their log-probabilities as
near as fp32 brings them: one wrong key among hundreds seldom changes which token is the likeliest. Policy and
preemption change from trial to trial, while the engine is idle.
"""

import os
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import count, product
from typing import Any
from unittest import mock

from cluster_configs.schema import (
    EngineSection,
    HandoffSection,
    ModelSection,
    ObjectivesSection,
    StreamingSection,
    TiersSection,
)
from cluster_core.engine_jobs import EngineJob, SamplingSpec, SessionMode
from cluster_core.engine_reports import EngineCosts
from decode_worker.step_bound import Limit
from kv_transfer import vllm_private
from kv_transfer.between_steps import look_before_steps
from kv_transfer.tiers.async_loads import AsyncLoads
from prefill_worker.policies import POLICIES, make_policy
from tests.campaign.fuzz.session_moves import Client, Kind, Move
from tests.campaign.fuzz.tally import Tally, raised
from worker_runtime.engine_settings import EngineRole, EngineSettings, engine_environment

BLOCKS = 24
MODEL_LEN = 640
MAX_BATCHED_TOKENS = 192
PLACES = 5
HOST_GIB = 0.004
STARVATION_S = 0.2
# For other processors: on those tried so far, not one bit differed.
LOGPROB_TOLERANCE = 1e-4
SETTINGS = tuple(product(POLICIES, ("swap", "recompute", "cost")))
_MOST_TOKENS = 4
_MOST_STEPS = 4000
# Of whole requests: so long that sessions are computed beside it.
_LONG_ANSWER = 12
# As if a step took 10 ms, and 1 ms for each token of a prompt: 37 of them beside decodes.
_TPOT_S = 0.05
_COSTS = EngineCosts(decode_step_s=0.010, prefill_s_per_token=0.001)


class RealEngine:
    """An engine as workers start it, with a tiny pool; stepped by `step`."""

    def __init__(self, role: EngineRole = EngineRole.PREFILL) -> None:
        self.role = role
        engine = EngineSection(
            kv_blocks=BLOCKS,
            max_model_len=MODEL_LEN,
            max_batched_tokens=MAX_BATCHED_TOKENS,
            max_running_requests=PLACES,
        )
        streaming = StreamingSection(starvation_s=STARVATION_S)
        tiers = TiersSection(host_gib=HOST_GIB, promotion_pause=2)
        settings = EngineSettings(
            *(ModelSection(), engine, HandoffSection(), role, streaming),
            tiers=tiers,
            objectives=ObjectivesSection(tpot_s=_TPOT_S),
        )
        os.environ.update(engine_environment(settings))
        from vllm.v1.engine.llm_engine import LLMEngine

        from worker_runtime.vllm_arguments import engine_args

        self.engine = LLMEngine.from_engine_args(engine_args(settings))
        look_before_steps(self.engine)
        self.scheduler: Any = vllm_private.scheduler_of(self.engine)
        self.answers: dict[str, list[tuple[int, float]]] = defaultdict(list)
        vllm_private.tell_costs(self.engine, lambda: _COSTS)

    @property
    def chunks(self) -> Counter[Limit]:
        """Of one that does both: steps beside decodes, by what decided their chunk."""
        return self.scheduler.chunks if self.role is EngineRole.SHARED else Counter()

    def use(self, policy: str, preemption: str) -> None:
        """From now on; the engine is idle."""
        # One engine plays all policies, since a start takes ten seconds; a scheduler is made with one.
        self.scheduler._order = make_policy(policy, STARVATION_S)
        self.scheduler.preemption_strategy = preemption

    def params(self, max_tokens: int, *, reads_cache: bool = True) -> Any:
        from worker_runtime.vllm_conversion import sampling_params

        job = EngineJob("", (), SamplingSpec(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, logprobs=0))
        params = sampling_params(job, 1.0)
        params.skip_reading_prefix_cache = not reads_cache
        return params

    def step(self, turns: int) -> None:
        for _ in range(turns):
            if not self.scheduler.has_requests():
                return
            for output in self.engine.step():
                answer = self.answers[output.request_id.split("-")[0]]
                for token, row in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True):
                    answer.append((token, row[token].logprob))

    def finish(self) -> None:
        """Steps until everything is answered. Raises AssertionError when that does not end."""
        self.step(_MOST_STEPS)
        assert not self.scheduler.has_unfinished_requests(), f"stuck: {sorted(self.scheduler.requests)}"

    def fresh(self, name: str, prompt: list[int], max_tokens: int, *, reads_cache: bool) -> None:
        params = self.params(max_tokens, reads_cache=reads_cache)
        self.engine.add_request(name, {"prompt_token_ids": list(prompt)}, params)

    def check_idle(self) -> None:
        """Raises AssertionError unless every block and host slot is back."""
        assert not self.scheduler.requests
        # A leak of state of requests that have ended is visible nowhere else.
        assert not self.scheduler._sessions
        assert vllm_private.block_counts(self.engine) == (BLOCKS - 1, BLOCKS - 1)
        assert self.scheduler.swaps.free_slots == self.scheduler.swaps.slots
        vllm_private.pool_of(self.scheduler).check_invariants()

    def recover(self) -> bool:
        """After a trial that broke: drops whatever is left, and the cache. False: the engine is of no use any more."""
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        self.step(_MOST_STEPS)
        # The ledger alone knows the sessions that a broken trial left swapped.
        for request_id in list(self.scheduler.swaps._swapped):
            self.scheduler.swaps.drop(request_id)
        self.answers.clear()
        # Records of sessions of that trial, which nobody will take any more.
        self.scheduler._ended.clear()
        if self.scheduler.requests or not self.engine.reset_prefix_cache():
            return False
        return not next(play(self, seed=0)).wrong

    def close(self) -> None:
        self.engine.engine_core.shutdown()


@dataclass(slots=True)
class _Session:
    prompt: Any
    mode: SessionMode
    token_ids: list[int]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class _Whole:
    """A request without a session."""

    token_ids: list[int]
    max_tokens: int


class _Trial:
    """A few sessions at once, then the comparison."""

    def __init__(self, real: RealEngine, rng: random.Random, tally: Tally, number: int) -> None:
        self.real, self.rng, self.tally, self.number = real, rng, tally, number
        self.client = Client(rng, longest=MODEL_LEN - 2 * _MOST_TOKENS, bases=2)
        self.open: dict[str, _Session] = {}
        self.closed: dict[str, _Session] = {}
        self.whole: dict[str, _Whole] = {}

    def run(self, sessions: int) -> None:
        before, chunks = replace(self.real.scheduler.tiers.counters), Counter(self.real.chunks)
        swapped_before = self.real.scheduler.swaps.counters.blocks_back_async
        for index in range(sessions):
            self._open(f"t{self.number}x{index}")
            if self.real.role is EngineRole.SHARED:
                self._add_whole(f"w{self.number}x{index}")
        while self.open:
            self._carry_out(self.rng.choice(list(self.open)))
            self.real.step(self.rng.randrange(3))
        self.real.finish()
        self._count()
        self._compare()
        self.real.check_idle()
        self.tally.count_tiers(before, self.real.scheduler.tiers.counters)
        self.tally.swapped_back_async += self.real.scheduler.swaps.counters.blocks_back_async - swapped_before
        self.tally.bounded += self.real.chunks[Limit.TPOT] - chunks[Limit.TPOT]

    def _open(self, name: str) -> None:
        from worker_runtime.engine_sessions import SessionPrompt

        rng, mode = self.rng, self.rng.choice(list(SessionMode))
        prompt, max_tokens = self.client.first_prompt(), rng.choice((1, 1, _MOST_TOKENS))
        job = EngineJob(name, tuple(prompt), SamplingSpec(max_tokens=max_tokens), priority=1)
        session = SessionPrompt(self.real.engine, job, mode, self.real.params(max_tokens), None)
        assert self.real.scheduler.requests[session.internal_id].priority == job.priority
        self.open[name] = _Session(session, mode, prompt, max_tokens)
        if rng.random() < 0.5:
            self.real.step(rng.randrange(3))

    def _add_whole(self, name: str) -> None:
        whole = self.whole[name] = _Whole(self.client.prompt(), self.rng.choice((1, _LONG_ANSWER)))
        self.real.fresh(name, whole.token_ids, whole.max_tokens, reads_cache=True)

    def _carry_out(self, name: str) -> None:
        session = self.open[name]
        assert session.prompt.internal_id in self.real.scheduler.requests, f"{name} ended before its input was closed"
        swapped = bool(self.real.scheduler.swaps.tokens(session.prompt.internal_id))
        for move in self.client.moves(session.token_ids, session.mode, swapped=swapped):
            self._move(name, session, move)

    def _move(self, name: str, session: _Session, move: Move) -> None:
        session.token_ids = move.prompt_after(session.token_ids)
        if move.kind is Kind.APPEND:
            session.prompt.take_in(move.token_ids, replaces=False)
            self.tally.appends += 1
        elif move.kind is Kind.UPDATE:
            session.prompt.take_in(move.token_ids, replaces=True)
            self.tally.updates += 1
        elif move.kind is Kind.CLOSE:
            session.prompt.close(move.token_ids)
            self.closed[name] = self.open.pop(name)
        else:
            session.prompt.abort()
            self.tally.cancelled += 1
            del self.open[name]

    def _count(self) -> None:
        for name, session in self.closed.items():
            record = session.prompt.take_record()
            assert record is not None, f"{name} was closed and has no end"
            self.tally.swaps += record.preemptions_swap
            self.tally.recomputes += record.preemptions_recompute
            self.tally.invalidated_tokens += record.tokens.invalidated_tokens

    def _compare(self) -> None:
        ended: dict[str, _Session | _Whole] = {**self.closed, **self.whole}
        answers = {name: self.real.answers.pop(name, []) for name in ended}
        for reads_cache, kind in ((False, "a fresh one"), (True, "one that read the cache")):
            for name, each in ended.items():
                self.real.fresh(name, each.token_ids, each.max_tokens, reads_cache=reads_cache)
            self.real.finish()
            for name in ended:
                fresh = self.real.answers.pop(name)
                if not _same(fresh, answers[name]):
                    self.tally.wrong.append(f"{name}: {answers[name]}, {kind} gave {fresh}")
        self.tally.sessions += len(self.closed)
        self.tally.requests += len(self.whole)


def _same(first: list[tuple[int, float]], second: list[tuple[int, float]]) -> bool:
    return len(first) == len(second) and all(
        token == other and abs(logprob - other_logprob) < LOGPROB_TOLERANCE
        for (token, logprob), (other, other_logprob) in zip(first, second, strict=True)
    )


def _loads_beside_steps() -> AbstractContextManager[Any]:
    """All loads that might hold somebody up."""
    # Copies of a few small blocks take so little here that the rule has hardly any of them run beside steps.
    return mock.patch.object(AsyncLoads, "is_cheaper", lambda loads, load_s, others: others > 0)


def play(real: RealEngine, seed: int) -> Iterator[Tally]:
    """Trials without end: the tally of each. A trial that broke is the last: after it the engine is of no use."""
    rng = random.Random(seed)
    for number in count():
        real.use(*SETTINGS[number % len(SETTINGS)])
        tally = Tally()
        try:
            with _loads_beside_steps() if number % 2 else nullcontext():
                _Trial(real, rng, tally, number).run(rng.randrange(3, 15))
        except Exception as error:  # noqa: BLE001 - whatever breaks in a trial is a finding
            tally.wrong.append(f"trial {number} of seed {seed}: {raised(error)}")
            yield tally
            return
        yield tally
