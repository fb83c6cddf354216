"""The light engine by hand: what a step costs, what waits for what."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from cluster_core.engine_jobs import SessionMode
from cluster_sim.costs.step_work import StepWork
from cluster_sim.engines.engine import Outcome, OutcomeKind, SimInput, SimJob
from cluster_sim.engines.light_chunk_bound import ChunkBound
from cluster_sim.engines.light_engine import LightEngine, LightEngineSettings
from kv_transfer.tiers.settings import TierSettings
from kv_transfer.tiers.tier_terms import Admission, TierRules

BLOCK = 10


@dataclass(frozen=True, slots=True)
class Costs:
    """A millisecond for each prompt token, ten for a step that decodes and for a token loaded. Keeps what is asked."""

    asked: list[StepWork] = field(default_factory=list)
    name: str = "by hand"
    gpus: int = 1
    gpu_dollars_per_hour: float = 1.0
    kv_bytes_per_token: int = 1
    device_tokens: int = 1000
    host_tokens: int = 1000
    network_bytes_per_s: float = 1e6
    network_latency_s: float = 0.0

    def step_s(self, work: StepWork) -> float:
        self.asked.append(work)
        return 0.001 * work.prefill_tokens + 0.01 * (work.decode_requests > 0)

    def load_s(self, tokens: int) -> float:
        return 0.01 * tokens

    def store_s(self, tokens: int) -> float:
        return 0.0


def engine(costs: Costs, device_blocks: int = 100, host_blocks: int = 0, **given: Any) -> LightEngine:
    rules = TierRules(Admission.EVERYTHING, promotion=False)
    tiers = TierSettings(eviction="lru", rules=rules, filter_entries=1024)
    return LightEngine(costs, LightEngineSettings(BLOCK, device_blocks, host_blocks, tiers=tiers, **given))


def job(number: int, tokens: int, output_tokens: int = 1, name: int | None = None, *, pulls: bool = False) -> SimJob:
    keys = np.arange(tokens // BLOCK, dtype=np.uint64) + np.uint64(1 + 1000 * (number if name is None else name))
    return SimJob(number, tokens, keys, output_tokens, pulls=pulls)


def played(made: LightEngine, *jobs: tuple[float, SimJob]) -> dict[int, list[Outcome]]:
    """Jobs at their times, and everything up to the end."""
    told: dict[int, list[Outcome]] = {}
    waiting = sorted(jobs, key=lambda each: each[0])
    while waiting or made.next_s() < math.inf:
        now_s = min(waiting[0][0] if waiting else math.inf, made.next_s())
        for outcome in made.advance(now_s):
            told.setdefault(outcome.job.number, []).append(outcome)
        while waiting and waiting[0][0] <= now_s:
            made.add(waiting.pop(0)[1], now_s)
    made.check_invariants()
    return told


def ends(told: dict[int, list[Outcome]]) -> dict[int, float]:
    return {number: outcomes[-1].at_s for number, outcomes in told.items()}


def test_what_lies_in_host_memory_is_loaded_before_the_rest_is_computed_one_load_after_the_other() -> None:
    """Three prompts of 40 tokens in 6 blocks: the first two have left the device when they are asked for again."""
    made = engine(Costs(), device_blocks=10, host_blocks=50)
    first = [(float(number), job(number, 40)) for number in (1, 2)]
    others = [(2.0 + number, job(number, 40)) for number in (3, 4)]
    again = [(10.0, job(11, 40, name=1)), (10.0, job(12, 40, name=2))]
    told = played(made, *first, *others, *again)
    # Of each, 30 tokens lie in whole blocks before the last token: 0.3 s to load, 10 ms for the rest.
    assert ends(told)[11] == pytest.approx(10.31)
    assert ends(told)[12] == pytest.approx(10.61)
    assert made.totals.host_hit_tokens == 60
    assert made.costs().load_s_per_token == pytest.approx(0.01)


def test_what_is_loaded_for_somebody_who_leaves_is_not_lost() -> None:
    made = engine(Costs(), device_blocks=10, host_blocks=50)
    played(made, *((float(number), job(number, 40)) for number in (1, 2, 3, 4)))
    made.add(job(11, 40, name=1), 10.0)
    made.abort(11, 10.1)
    made.add(job(11, 40, name=1), 10.2)
    told = played(made)
    assert ends(told)[11] == pytest.approx(10.61), "behind the load that goes on"


def test_a_shared_prefix_counts_once_among_what_is_read() -> None:
    costs = Costs()
    told = played(engine(costs), (0.0, job(1, 50, 9)), (1.0, job(2, 50, 40, name=3)), (1.1, job(4, 50, 5, name=3)))
    assert len(told) == 3
    # The block of the last token is each one's own.
    both = [work for work in costs.asked if work.decode_requests == 2 and not work.prefill_tokens]
    assert both
    for work in both:
        assert work.context_tokens - work.distinct_tokens == 40


def test_no_more_run_than_may() -> None:
    made = engine(Costs(), max_running_requests=2)
    told = played(made, *((0.0, job(number, 100, 2)) for number in (1, 2, 3)))
    starts = {number: outcomes[0].at_s for number, outcomes in told.items()}
    assert starts[3] == pytest.approx(ends(told)[1] + 0.1 + 0.01 * (ends(told)[2] > ends(told)[1]), abs=0.02)
    assert starts[3] > ends(told)[1]


def test_who_does_not_fit_waits_until_somebody_ends_and_those_behind_wait_too() -> None:
    made = engine(Costs(), device_blocks=10)
    told = played(made, (0.0, job(1, 60, 20)), (0.01, job(2, 60, 1)), (0.02, job(3, 10, 1)))
    assert told[2][0].at_s == pytest.approx(ends(told)[1] + 0.06, abs=0.011)
    assert told[3][0].at_s >= told[2][0].at_s


def test_the_two_that_compute_one_prompt_at_once_keep_it_once() -> None:
    made = engine(Costs(), device_blocks=30)
    played(made, (0.0, job(1, 100, 1, name=7)), (0.0, job(2, 100, 1, name=7)))
    free, total = made.load()
    assert free == total
    assert len(made.claim_changes().device_stored) == 10
    again = played(made, (5.0, job(3, 100, 1, name=7)))
    assert ends(again)[3] == pytest.approx(5.01)


def test_steps_taken_at_once_take_as_long_as_one_by_one() -> None:
    """Somebody who comes in the middle of many steps joins at the end of the one under way."""
    told = played(engine(Costs()), (0.0, job(1, 10, 101)), (0.255, job(2, 20, 1)))
    # 10 ms of prompt, 24 whole steps by 0.25, one more to 0.26; then 20 tokens beside a step that decodes.
    assert ends(told)[2] == pytest.approx(0.26 + 0.03)
    assert ends(told)[1] == pytest.approx(0.01 + 100 * 0.01 + 0.02)


@pytest.mark.parametrize("cuts", [0, 1, 7])
def test_steps_that_grow_are_each_as_long_as_their_context(cuts: int) -> None:
    """Whether they are taken at once, or somebody looks in meanwhile who does not fit."""

    @dataclass(frozen=True, slots=True)
    class Growing(Costs):
        def step_s(self, work: StepWork) -> float:
            return 0.001 * work.context_tokens

    made = engine(Growing(), device_blocks=12)
    jobs = [(0.3 + 0.5 * number, job(2 + number, 100)) for number in range(cuts)]
    told = played(made, (0.0, job(1, 10, 101)), *jobs)
    # 11, 12 ... 110 tokens are attended to.
    assert ends(told)[1] == pytest.approx(sum(0.001 * context for context in range(11, 111)), abs=1e-6)


def test_a_pull_asks_for_what_is_not_there_and_generates_all_but_the_first_token() -> None:
    made = engine(Costs())
    played(made, (0.0, job(1, 50, 1, name=5)))
    made.add(job(2, 100, 3, name=5, pulls=True), 1.0)
    (asked,) = made.advance(1.0)
    assert (asked.kind, asked.tokens) == (OutcomeKind.PULLS, 50)
    assert made.next_s() == math.inf
    made.landed(2, 1.5)
    told = played(made)
    assert [each.kind for each in told[2]] == [OutcomeKind.FIRST_TOKEN, OutcomeKind.FINISHED]
    assert ends(told)[2] == pytest.approx(1.5 + 0.001 + 0.01)
    assert made.costs().pull_s_per_token == pytest.approx(0.01)
    assert made.totals.prefill_tokens == 50


def test_who_is_smaller_than_the_one_that_did_not_fit_gets_in_once_that_has_gone() -> None:
    """8 of 10 blocks are taken; one that wants 6 gives up, the next wants 2."""
    made = engine(Costs(), device_blocks=10)
    made.add(job(1, 60, 20), 0.0)
    made.add(job(2, 50, 10), 0.001)
    made.add(job(3, 10, 1), 0.002)
    made.abort(2, 0.01)
    told = played(made)
    assert told[3][0].at_s < ends(told)[1]


def test_a_small_one_is_not_held_back_by_what_a_large_one_could_not_have() -> None:
    made = engine(Costs(), device_blocks=10)
    made.add(job(1, 60, 20), 0.0)
    made.add(job(2, 60, 1), 0.001)
    told = played(made, (5.0, job(3, 70, 20)), (5.001, job(4, 5, 1)))
    assert told[4][0].at_s < ends(told)[3]


def test_a_slow_engine_decodes_slowly_as_well_and_from_the_next_step_on() -> None:
    made = engine(Costs())
    made.add(job(1, 10, 101), 0.0)
    made.advance(0.01)
    made.slow_down(3.0, 0.255)
    told = played(made)
    # Prompt, 25 steps by 0.26, and 75 that take three times as long.
    assert ends(told)[1] == pytest.approx(0.01 + 25 * 0.01 + 75 * 0.03)


# Chunks by cost. A step that decodes takes 10 ms, and each prompt token 1 ms more.

LONG_ANSWER = 60


def test_a_prompt_beside_a_decode_is_computed_in_chunks_whose_steps_stay_within_the_bound() -> None:
    costs = Costs()
    bound = ChunkBound(tpot_s=0.05, alpha=0.8, least_tokens=1)
    told = played(engine(costs, chunk_bound=bound), (0.0, job(1, 100, LONG_ANSWER)), (0.2, job(2, 100)))
    mixed = {work.prefill_tokens for work in costs.asked if work.decode_requests and work.prefill_tokens}
    # Steps of 40 ms hold 30 tokens; the last chunk of the 100 is what is left. Larger ones were asked about only.
    assert costs.step_s(StepWork(30, 0.0, 1, 0, 0)) == pytest.approx(0.04)
    assert 30 in mixed and 10 in mixed
    assert told[2][0].at_s == pytest.approx(0.2 + 3 * 0.04 + 0.02, abs=0.011)


def test_without_a_decode_the_bound_leaves_the_whole_budget() -> None:
    bound = ChunkBound(tpot_s=0.02, alpha=0.8, least_tokens=1)
    told = played(engine(Costs(), chunk_bound=bound), (0.0, job(1, 100)))
    assert told[1][0].at_s == pytest.approx(0.1)


def test_prompts_do_not_starve_beside_decodes_that_take_all_of_the_bound() -> None:
    bound = ChunkBound(tpot_s=0.005, least_tokens=5)
    told = played(engine(Costs(), chunk_bound=bound), (0.0, job(1, 100, LONG_ANSWER)), (0.2, job(2, 100)))
    # 20 steps of 15 ms.
    assert told[2][0].at_s == pytest.approx(0.2 + 20 * 0.015, abs=0.011)


def test_the_bound_yields_to_a_prompt_that_would_be_late_as_far_as_that_needs() -> None:
    patient, pressed = (
        played(
            engine(Costs(), chunk_bound=ChunkBound(tpot_s=0.04, ttft_s=ttft_s, alpha=0.5, least_tokens=1)),
            (0.0, job(1, 100, LONG_ANSWER + 100)),
            (1.0, job(2, 100)),
        )
        for ttft_s in (10.0, 0.15)
    )
    # 10 tokens in 20 ms, ten times; or 20 in 30 ms, five times.
    assert patient[2][0].at_s == pytest.approx(1.0 + 0.2, abs=0.011)
    assert pressed[2][0].at_s == pytest.approx(1.0 + 0.15, abs=0.011)


def test_for_a_first_token_that_is_late_already_a_step_takes_what_the_decode_has_to_spare() -> None:
    """Steps of 10 ms leave it 2 ms each, or 10."""
    tight, loose = (
        played(
            engine(Costs(), chunk_bound=ChunkBound(tpot_s=tpot_s, ttft_s=0.001, alpha=1.0, least_tokens=5)),
            (0.0, job(1, 100, LONG_ANSWER)),
            (0.3, job(2, 100)),
        )
        for tpot_s in (0.012, 0.020)
    )
    # After 20 steps a step of 52 ms, and then 5 tokens each; or all at once.
    assert tight[2][0].at_s == pytest.approx(0.3 + 0.052 + 12 * 0.015, abs=0.015)
    assert loose[2][0].at_s == pytest.approx(0.3 + 0.11, abs=0.011)
    answer_s = tight[1][-1].at_s - tight[1][0].at_s
    assert answer_s / (LONG_ANSWER - 1) < 1.1 * 0.012, "but for steps of at least 5 tokens"


def test_a_prompt_finds_what_one_before_it_computes_meanwhile() -> None:
    """Two turns of a conversation at once, in steps of 100 tokens: the second computes its own 50 alone."""
    made = engine(Costs(), max_batched_tokens=100)
    made.add(job(1, 400, name=1), 0.0)
    made.add(job(2, 450, name=1), 0.0)
    told = played(made)
    assert told[1][0].at_s == pytest.approx(0.4)
    assert told[2][0].at_s == pytest.approx(0.45, abs=0.011)
    assert made.totals.prefill_tokens == 450


def test_a_bound_yields_to_a_first_token_of_a_prompt_that_waits_behind_another_one() -> None:
    """Nine tokens a step beside the decode: the first prompt takes 12 steps, 0.23 s, the second would be late then."""
    bound = ChunkBound(tpot_s=0.02, ttft_s=0.3, least_tokens=5)
    made = engine(Costs(), max_batched_tokens=200, chunk_bound=bound)
    decode, first, second = (0.0, job(1, 10, 200)), (0.6, job(2, 100)), (0.6, job(3, 100))
    told = played(made, decode, first, second)
    assert told[3][0].at_s - 0.6 == pytest.approx(0.3)


def test_a_session_that_waits_and_gets_a_shorter_prompt_takes_no_budget_from_others() -> None:
    """It had 300 tokens cached of its first prompt, and is left with 20."""
    bound = ChunkBound(tpot_s=0.012, ttft_s=60.0, least_tokens=5)
    made = engine(Costs(), max_batched_tokens=100, chunk_bound=bound)
    played(made, (0.0, job(1, 320, name=7)))
    now_s = 1.0
    made.add(job(2, 10, 40), now_s)
    made.add(job(3, 200), now_s)
    no_keys = np.zeros(0, dtype=np.uint64)
    whole = SimInput((), 320, 0, no_keys)
    shorter = SimInput((), 20, 0, no_keys, replaces=True, is_last=False)
    made.open(job(4, 320, name=7), whole, SessionMode.UPDATE, now_s)
    made.take_input(4, shorter, now_s)
    made.advance(1.5)
    made.abort(4, 1.5)
    assert set(played(made)) == {2, 3}


@pytest.mark.parametrize(("pulled_first", "at_s"), [(False, 0.8), (True, 0.5)])
def test_a_request_whose_kv_has_been_pulled_waits_for_no_prompt_where_it_comes_first(
    pulled_first: bool, at_s: float
) -> None:
    """The first prompt is in its step when the KV lands, the second stands before the pulled request."""
    made = engine(Costs(), max_batched_tokens=300, pulled_first=pulled_first)
    for number, tokens in ((1, 200), (2, 400)):
        made.add(job(number, tokens), 0.0)
    made.add(job(3, 50, 2, pulls=True), 0.0)
    made.landed(3, 0.0)
    made.add(job(4, 200), 0.0)
    assert played(made)[3][-1].at_s == pytest.approx(at_s)
