"""What every engine of the simulated cluster does alike: the contract of `cluster_sim.engines.engine.SimEngine`."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from cluster_core.engine_jobs import SessionMode
from cluster_sim.costs.step_work import StepWork
from cluster_sim.engines.engine import Outcome, OutcomeKind, SimEngine, SimInput, SimJob
from cluster_sim.engines.light_engine import LightEngine, LightEngineSettings
from kv_transfer.claims.prefix_chunks import Keys

BLOCK = 16
FIRST, FINISHED, PULLS, REFUSED = (
    OutcomeKind.FIRST_TOKEN,
    OutcomeKind.FINISHED,
    OutcomeKind.PULLS,
    OutcomeKind.REFUSED,
)


@dataclass(frozen=True, slots=True)
class FlatCosts:
    """Seconds: 10 ms a step, 0.1 ms a prompt token, 1 us a distinct token of context."""

    name: str = "flat"
    gpus: int = 1
    gpu_dollars_per_hour: float = 1.0
    kv_bytes_per_token: int = 1024
    device_tokens: int = 1600
    host_tokens: int = 0
    network_bytes_per_s: float = 1e9
    network_latency_s: float = 0.0

    def step_s(self, work: StepWork) -> float:
        return 0.01 + 1e-4 * work.prefill_tokens + 1e-6 * work.distinct_tokens

    def load_s(self, tokens: int) -> float:
        return 1e-5 * tokens

    def store_s(self, tokens: int) -> float:
        return 1e-5 * tokens


Make = Callable[..., SimEngine]


def _light(blocks: int = 100, **settings: Any) -> SimEngine:
    return LightEngine(FlatCosts(), LightEngineSettings(BLOCK, blocks, **settings))


def _vllm(kind: str) -> Make:
    def make(blocks: int = 100, **settings: Any) -> SimEngine:
        from cluster_sim.engines.vllm_engine import VllmSimEngine
        from cluster_sim.engines.vllm_schedulers import SchedulerKind, VllmEngineSettings

        return VllmSimEngine(FlatCosts(), VllmEngineSettings(SchedulerKind(kind), BLOCK, blocks, **settings))

    return make


def _params(*kinds: str) -> list[Any]:
    return [pytest.param(_vllm(each), id=each, marks=pytest.mark.integration) for each in kinds]


@pytest.fixture(params=[pytest.param(_light, id="light"), *_params("plain", "streaming", "decode")])
def make(request: pytest.FixtureRequest) -> Make:
    chosen: Make = request.param
    return chosen


def keys_of(prompt: int, prefix: int = 0, group: int = 0) -> Keys:
    """Names of the blocks of a prompt of its own, but for the first ones, which a group shares."""
    own = prompt // BLOCK - prefix
    shared = np.arange(prefix, dtype=np.uint64) + np.uint64(10**9 + group * 10**6)
    return np.concatenate((shared, np.arange(own, dtype=np.uint64) + np.uint64(next(_fresh) * 10**4)))


_fresh = iter(range(1, 10**6))


def job(number: int, prompt: int = 64, output: int = 4, keys: Keys | None = None, **fields: Any) -> SimJob:
    return SimJob(number, prompt, keys_of(prompt) if keys is None else keys, output, **fields)


def drain(engine: SimEngine, until_s: float = math.inf) -> list[Outcome]:
    """All that comes of it by itself."""
    outcomes: list[Outcome] = []
    now_s = 0.0
    for _ in range(10_000):
        next_s = engine.next_s()
        if next_s > until_s or next_s == math.inf:
            return outcomes
        assert next_s >= now_s, "time goes back"
        now_s = next_s
        found = engine.advance(now_s)
        assert all(each.at_s <= now_s for each in found), "something is told before it has happened"
        outcomes += found
        engine.check_invariants()
    raise AssertionError("it does not end")


def told(outcomes: Sequence[Outcome]) -> list[tuple[int, OutcomeKind]]:
    return [(each.job.number, each.kind) for each in outcomes]


def test_a_job_has_its_first_token_after_one_step_and_ends_with_its_last(make: Make) -> None:
    engine = make()
    engine.add(job(1, prompt=64, output=4), 5.0)
    first, last = drain(engine)
    assert (first.kind, first.tokens) == (FIRST, 64)
    assert first.at_s == pytest.approx(5.0 + 0.01 + 64e-4)
    assert last.kind is FINISHED
    assert last.at_s == pytest.approx(first.at_s + 3 * 0.01, rel=0.01)
    totals = engine.totals
    assert totals.busy_s == pytest.approx(last.at_s - 5.0)
    assert (totals.prefill_tokens, totals.decode_tokens, totals.decode_steps) == (64, 3, 3)
    assert engine.load() == (100, 100)
    assert engine.next_s() == math.inf


def test_what_is_known_of_a_prompt_is_not_computed_again(make: Make) -> None:
    engine = make()
    same = keys_of(96)
    computed = []
    for number, prompt, keys in ((1, 100, keys_of(100, 3)), (2, 100, keys_of(100, 3)), (3, 96, same), (4, 96, same)):
        engine.add(job(number, prompt, 1, keys), float(number))
        computed += [each.tokens for each in drain(engine) if each.kind is FIRST]
    assert computed == [100, 100 - 48, 96, 16]
    assert engine.totals.device_hit_tokens == 48 + 80


def test_a_handed_off_prompt_keeps_its_blocks_until_it_is_released(make: Make) -> None:
    engine = make()
    engine.add(job(1, 100, 1, hand_off=True), 0.0)
    assert told(drain(engine)) == [(1, FIRST), (1, FINISHED)]
    assert engine.load() == (93, 100)
    engine.release(1, 1.0)
    engine.release(1, 1.0)
    engine.release(7, 1.0)
    assert not drain(engine)
    assert engine.load() == (100, 100)


def test_a_pull_takes_what_is_not_cached_and_computes_after_it_has_landed(make: Make) -> None:
    engine = make()
    keys = keys_of(100)
    engine.add(job(1, 100, 1, keys), 0.0)
    drain(engine)
    engine.add(job(2, 100, 3, keys, pulls=True), 1.0)
    (pull,) = drain(engine)
    assert (pull.kind, pull.tokens, pull.at_s) == (PULLS, 4, 1.0)
    engine.add(job(3, 100, 3, pulls=True), 1.5)
    assert [(each.job.number, each.tokens) for each in drain(engine)] == [(3, 100)]
    assert engine.load()[0] < 100 - 7
    prefilled = engine.totals.prefill_tokens
    engine.landed(9, 2.0)
    engine.landed(3, 2.0)
    outcomes = drain(engine)
    assert told(outcomes) == [(3, FIRST), (3, FINISHED)]
    assert outcomes[0].at_s == pytest.approx(2.01, rel=0.001)
    assert engine.totals.prefill_tokens == prefilled, "nothing of a pulled prompt is computed"
    engine.landed(2, 3.0)
    assert told(drain(engine)) == [(2, FIRST), (2, FINISHED)]
    assert engine.load() == (100, 100)


def test_who_finds_no_room_waits_for_it(make: Make) -> None:
    engine = make(blocks=10)
    engine.add(job(1, 100, 1, hand_off=True), 0.0)
    drain(engine)
    engine.add(job(2, 100, 1), 1.0)
    assert not drain(engine, until_s=2.0)
    engine.release(1, 2.0)
    outcomes = drain(engine)
    assert told(outcomes) == [(2, FIRST), (2, FINISHED)]
    assert outcomes[0].at_s == pytest.approx(2.02)


def test_what_can_never_fit_is_refused_at_once(make: Make) -> None:
    engine = make(blocks=10)
    engine.add(job(1, 200, 1), 1.0)
    (refused,) = drain(engine)
    assert (refused.kind, refused.at_s) == (REFUSED, 1.0)
    engine.abort(1, 1.0)
    engine.add(job(2, 100, 1), 2.0)
    assert told(drain(engine)) == [(2, FIRST), (2, FINISHED)]


def test_who_is_aborted_is_heard_of_no_more_wherever_he_was(make: Make) -> None:
    engine = make(blocks=20, max_running_requests=4)
    engine.add(job(1, 100, 50), 0.0)
    engine.add(job(2, 64, 50, pulls=True), 0.0)
    engine.add(job(3, 100, 1, hand_off=True), 0.0)
    engine.add(job(4, 100, 50), 0.0)
    before = drain(engine, until_s=0.1)
    assert (1, FIRST) in told(before)
    assert (2, PULLS) in told(before)
    for number in (1, 2, 3, 4, 4, 8):
        engine.abort(number, 0.1)
        engine.check_invariants()
    engine.landed(2, 0.1)
    assert not drain(engine)
    assert engine.load() == (20, 20)


def test_steps_that_begin_after_a_slow_down_take_longer(make: Make) -> None:
    engine = make()
    engine.slow_down(2.0, 0.0)
    engine.add(job(1, 64, 11), 0.0)
    first, last = drain(engine)
    assert first.at_s == pytest.approx(2 * 0.0164)
    assert last.at_s - first.at_s == pytest.approx(10 * 0.02, rel=0.01)
    engine.add(job(2, 64, 21), 10.0)
    drain(engine, until_s=10.04)
    engine.slow_down(1.0, 10.04)
    (last,) = drain(engine)
    # The step under way is a slow one still; its first one ends at 10.0328.
    assert last.at_s == pytest.approx(10.0328 + 0.02 + 19 * 0.01, rel=0.001)


def test_what_comes_while_steps_run_joins_the_next_one(make: Make) -> None:
    engine = make()
    engine.add(job(1, 64, 100), 0.0)
    drain(engine, until_s=0.1)
    engine.add(job(2, 64, 1), 0.1)
    first = next(each for each in drain(engine) if each.job.number == 2)
    began_s = 0.0164 + math.ceil((0.1 - 0.0164) / 0.01) * 0.01
    assert first.at_s == pytest.approx(began_s + 0.0164, rel=0.01)


def test_contexts_that_are_shared_are_read_once(make: Make) -> None:
    engine = make(blocks=1000)
    keys = keys_of(3200, prefix=200)
    engine.add(job(1, 3200, 1, keys), 0.0)
    drain(engine)
    for number in (2, 3, 4):
        engine.add(job(number, 3200, 101, keys), 1.0)
    outcomes = [each for each in drain(engine) if each.kind is FINISHED]
    decode_s = outcomes[0].at_s - 1.0 - (0.01 + 3 * 16e-4)
    # One copy of the 199 blocks that all found, what each has of its own, and what they generate: 50 tokens on average.
    assert decode_s == pytest.approx(100 * (0.01 + 1e-6 * (3184 + 3 * (16 + 50))), rel=0.01)


def test_caches_tell_what_comes_and_goes(make: Make) -> None:
    engine = make(blocks=10)
    keys, other = keys_of(96), keys_of(144)
    engine.add(job(1, 96, 1, keys), 0.0)
    drain(engine)
    change = engine.claim_changes()
    assert sorted(change.device_stored.tolist()) == sorted(keys.tolist())
    assert not len(change.device_removed)
    assert not len(engine.claim_changes())
    engine.add(job(2, 144, 1, other), 1.0)
    drain(engine)
    change = engine.claim_changes()
    assert set(change.device_stored.tolist()) == set(other.tolist())
    assert set(change.device_removed.tolist()) <= set(keys.tolist())
    assert len(change.device_removed) >= 5


def test_costs_are_those_of_its_own_steps(make: Make) -> None:
    engine = make(blocks=1000)
    for number in range(1, 40):
        engine.add(job(number, 100 + 8 * number, 2), float(number))
        drain(engine)
    costs = engine.costs()
    assert costs.prefill_s + 200 * costs.prefill_s_per_token + 20_000 * costs.prefill_s_per_pair == pytest.approx(
        0.03, rel=0.03
    )
    assert costs.decode_step_s == pytest.approx(0.01, rel=0.05)


@dataclass(slots=True)
class Played:
    outcomes: list[tuple[int, OutcomeKind, float, int]]
    claims: list[int]
    load: tuple[int, int]


def play(engine: SimEngine, seed: int, jobs: int = 40, *, looks: bool = False) -> Played:
    """A random life: whoever hands off is released later, whoever pulls gets it, some are aborted.

    looks: `advance` is asked at times when nothing is due as well.
    """
    rng = random.Random(seed)
    planned: list[tuple[float, int, Callable[[float], None]]] = []
    now_s, count = 0.0, 0
    for number in range(1, jobs + 1):
        now_s += rng.expovariate(20)
        prompt, prefix = rng.randrange(10, 300), rng.choice((0, 0, 2, 5))
        shared = np.arange(min(prefix, prompt // BLOCK), dtype=np.uint64) + np.uint64(7 * 10**6)
        own = np.arange(prompt // BLOCK - len(shared), dtype=np.uint64) + np.uint64(number * 1000)
        each = SimJob(
            number,
            prompt,
            np.concatenate((shared, own)),
            rng.randrange(1, 60),
            hand_off=rng.random() < 0.3,
            pulls=rng.random() < 0.3,
        )
        planned.append((now_s, count := count + 1, partial(engine.add, each)))
        if rng.random() < 0.1:
            at_s = now_s + rng.random()
            planned.append((at_s, count := count + 1, partial(engine.abort, number)))
    delays = {number: rng.random() / 2 for number in range(1, jobs + 1)}
    played = Played([], [], (0, 0))
    looked_s = 0.0
    while planned or engine.next_s() < math.inf:
        planned.sort(key=lambda row: row[:2])
        next_s = min(engine.next_s(), planned[0][0] if planned else math.inf)
        if looks and next_s - looked_s > 1e-3:
            assert not engine.advance((looked_s + next_s) / 2)
        looked_s = next_s
        if planned and planned[0][0] <= engine.next_s():
            at_s, _, action = planned.pop(0)
            action(at_s)
        for outcome in engine.advance(next_s):
            number, at_s = outcome.job.number, next_s + delays[outcome.job.number]
            played.outcomes.append((number, outcome.kind, outcome.at_s, outcome.tokens))
            if outcome.kind is PULLS:
                planned.append((at_s, count := count + 1, partial(engine.landed, number)))
            elif outcome.kind is FINISHED and outcome.job.hand_off:
                planned.append((at_s, count := count + 1, partial(engine.release, number)))
        engine.check_invariants()
        change = engine.claim_changes()
        played.claims += [*change.device_stored.tolist(), *(-each for each in change.device_removed.tolist())]
    played.load = engine.load()
    return played


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_lost_and_everybody_ends_whatever_comes(make: Make, seed: int) -> None:
    played = play(make(blocks=60), seed)
    assert played.load == (60, 60)
    ends = [number for number, kind, _, _ in played.outcomes if kind in (FINISHED, REFUSED)]
    assert len(ends) == len(set(ends)) >= 34
    times_s = [at_s for _, _, at_s, _ in played.outcomes]
    assert times_s == sorted(times_s)
    for number in ends:
        kinds = [kind for each, kind, _, _ in played.outcomes if each == number]
        assert kinds in ([FIRST, FINISHED], [PULLS, FIRST, FINISHED])
    there: set[int] = set()
    for key in played.claims:
        (there.add if key > 0 else there.remove)(abs(key))
    assert len(there) <= 60


def test_the_same_life_again_gives_the_same_outcomes(make: Make) -> None:
    assert play(make(blocks=60), 5) == play(make(blocks=60), 5)


def test_looking_at_it_changes_nothing(make: Make) -> None:
    assert play(make(blocks=60), 6).outcomes == play(make(blocks=60), 6, looks=True).outcomes


@pytest.fixture(params=_params("plain", "streaming", "decode"))
def make_vllm(request: pytest.FixtureRequest) -> Make:
    chosen: Make = request.param
    return chosen


@pytest.mark.parametrize("blocks", [60, 400])
def test_steps_taken_at_once_are_those_taken_one_by_one(make_vllm: Make, blocks: int) -> None:
    leaping, walking = make_vllm(blocks), make_vllm(blocks, leaps=False)
    leaps, steps = play(leaping, 1), play(walking, 1)
    assert [row[:2] for row in leaps.outcomes] == [row[:2] for row in steps.outcomes]
    for one, other in zip(leaps.outcomes, steps.outcomes, strict=True):
        assert one[2:] == pytest.approx(other[2:])
    assert leaping.totals.decode_steps == walking.totals.decode_steps
    assert leaping.totals.preemptions == walking.totals.preemptions


def test_a_leap_saves_the_scheduler_steps(make_vllm: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = make_vllm()
    counted = 0
    schedule = engine._scheduler.schedule

    def counting() -> Any:
        nonlocal counted
        counted += 1
        return schedule()

    monkeypatch.setattr(engine._scheduler, "schedule", counting)
    engine.add(job(1, 64, 161), 0.0)
    drain(engine)
    assert engine.totals.decode_steps == 160
    assert counted <= 1 + 1 + 160 // 16


def test_who_is_preempted_ends_all_the_same(make_vllm: Make) -> None:
    engine = make_vllm(blocks=20)
    for number in range(1, 5):
        engine.add(job(number, 64, 100), 0.0)
    outcomes = drain(engine)
    assert sorted(each.job.number for each in outcomes if each.kind is FINISHED) == [1, 2, 3, 4]
    assert engine.totals.preemptions > 0
    assert engine.load() == (20, 20)


@pytest.mark.integration
@pytest.mark.parametrize("kind", ["streaming", "decode"])
def test_host_memory_gives_back_what_the_device_had_no_room_for(kind: str) -> None:
    from kv_transfer.tiers.settings import TierSettings
    from kv_transfer.tiers.tier_terms import Admission, TierRules

    tiers = replace(TierSettings(), rules=TierRules(Admission.EVERYTHING, promotion=False))
    engine = _vllm(kind)(blocks=20, host_blocks=100, tiers=tiers)
    prompts = [keys_of(256) for _ in range(4)]
    for round_s in (0.0, 10.0):
        for index, keys in enumerate(prompts):
            engine.add(job(int(round_s) * 10 + index + 1, 256, 1, keys), round_s + index)
            outcomes = drain(engine)
    assert engine.totals.host_hit_tokens >= 3 * 240
    first = next(each for each in outcomes if each.kind is FIRST)
    assert first.at_s == pytest.approx(13.0 + 0.01 + 16e-4 + 240e-5, rel=1e-4), "the load comes before the step"
    assert engine.costs().load_s_per_token == pytest.approx(1e-5)
    assert len(engine.claim_changes().host_stored) >= 60
    assert engine.load() == (20, 20)


@pytest.mark.integration
def test_a_miscounted_block_is_noticed() -> None:
    engine: Any = _vllm("plain")()
    engine.add(job(1, 100, 1, hand_off=True), 0.0)
    drain(engine)
    engine._scheduler.kv_cache_manager.block_pool.get_new_blocks(1)
    with pytest.raises(AssertionError):
        engine.check_invariants()


@pytest.mark.integration
def test_the_clock_of_the_process_is_its_own_again() -> None:
    import time

    real = time.monotonic
    engine = _vllm("decode")()
    engine.add(job(1, 100, 10), 0.0)
    drain(engine)
    assert time.monotonic is real


def give(engine: SimEngine, number: int, tokens: list[int], now_s: float, **fields: Any) -> None:
    """An input of a session whose prompts have no names."""
    told = {"prompt_tokens": len(tokens), "kept_tokens": 0, "keys": np.empty(0, np.uint64)}
    engine.take_input(number, SimInput(tokens, **{**told, **fields}), now_s)


def begin(engine: SimEngine, number: int, tokens: list[int], now_s: float, mode: str = "append", **fields: Any) -> None:
    first = SimInput(tokens, len(tokens), 0, np.empty(0, np.uint64))
    engine.open(SimJob(number, 0, first.keys, 1, **fields), first, SessionMode(mode), now_s)


_sessions = _vllm("streaming")


@pytest.mark.integration
def test_a_session_computes_its_input_as_it_comes_and_answers_when_it_is_closed() -> None:
    engine: Any = _sessions()
    begin(engine, 1, [1] * 10, 0.0)
    assert not drain(engine)
    give(engine, 1, [2] * 300, 1.0)
    assert not drain(engine)
    assert engine.totals.prefill_tokens == 309, "one token is held back"
    give(engine, 1, [3] * 20, 2.0, is_last=True)
    first, last = drain(engine)
    assert (first.kind, first.tokens, last.kind) == (FIRST, 330, FINISHED)
    assert first.at_s == pytest.approx(2.0 + 0.01 + 21e-4)
    assert engine.records.pop(1).tokens.computed_tokens == 330
    assert engine.load() == (100, 100)
    assert engine.totals.device_hit_tokens == 0


@pytest.mark.integration
def test_a_replaced_prompt_keeps_what_both_begin_with() -> None:
    engine: Any = _sessions()
    begin(engine, 1, [1] * 160, 0.0, "update")
    drain(engine)
    give(engine, 1, [1] * 80 + [2] * 100, 1.0, replaces=True, is_last=True)
    first = drain(engine)[0]
    assert first.at_s == pytest.approx(1.0 + 0.01 + 100e-4)
    assert engine.totals.invalidated_tokens == 79


@pytest.mark.integration
def test_a_session_finds_what_is_cached_and_leaves_what_it_has_computed() -> None:
    engine: Any = _sessions()
    keys = keys_of(320)
    engine.add(job(1, 160, 1, keys[:10]), 0.0)
    drain(engine)
    first = SimInput([1] * 160, 160, 0, keys[:10])
    engine.open(SimJob(2, 320, keys, 1), first, SessionMode.APPEND, 1.0)
    drain(engine)
    give(engine, 2, [1] * 160, 2.0, prompt_tokens=320, keys=keys, is_last=True)
    assert [each.tokens for each in drain(engine) if each.kind is FIRST] == [320 - 144]
    assert engine.totals.device_hit_tokens == 144
    engine.add(job(3, 320, 1, keys), 3.0)
    assert [each.tokens for each in drain(engine) if each.kind is FIRST] == [16]


@pytest.mark.integration
def test_prompts_without_names_find_nothing_of_each_other() -> None:
    engine: Any = _sessions()
    for number in (1, 2):
        begin(engine, number, [1] * 160, float(number))
        give(engine, number, [number] * 160, number + 0.5)
        give(engine, number, [3] * 20, number + 0.6, is_last=True)
        drain(engine)
    assert engine.records[2].tokens.computed_tokens == 340


@pytest.mark.integration
def test_sessions_that_do_not_fit_together_all_end() -> None:
    engine: Any = _sessions(blocks=40, prefix_caching=False, host_blocks=20, preemption="swap")
    for number in range(1, 9):
        begin(engine, number, [number] * 20, number / 100)
        drain(engine, until_s=number / 100)
    for number in range(1, 9):
        give(engine, number, [number] * 150, 1.0 + number / 100)
        drain(engine, until_s=1.0 + number / 100)
    outcomes = drain(engine)
    for number in range(1, 9):
        give(engine, number, [9] * 20, 5.0 + number / 10, is_last=True)
        outcomes += drain(engine, until_s=5.0 + number / 10)
    outcomes += drain(engine)
    assert sorted(each.job.number for each in outcomes if each.kind is FINISHED) == list(range(1, 9))
    assert sum(each.preemptions_swap for each in engine.records.values()) > 0
    assert engine.load() == (40, 40)


@pytest.mark.integration
def test_a_session_that_outgrows_the_device_is_refused() -> None:
    engine = _sessions(blocks=20)
    begin(engine, 1, [1] * 100, 0.0)
    begin(engine, 2, [2] * 100, 0.0)
    drain(engine)
    give(engine, 1, [1] * 400, 1.0, prompt_tokens=500)
    (refused,) = drain(engine)
    assert (refused.job.number, refused.kind) == (1, REFUSED)
    give(engine, 1, [1], 1.5, is_last=True)
    give(engine, 2, [2], 2.0, is_last=True)
    assert told(drain(engine)) == [(2, FIRST), (2, FINISHED)]
    assert engine.load() == (20, 20)
