"""What every engine of the simulated cluster does alike: the contract of `cluster_sim.engines.engine.SimEngine`."""

import math

import pytest

from tests.fakes.sim_engines import (
    FINISHED,
    FIRST,
    PULLS,
    REFUSED,
    Make,
    drain,
    job,
    keys_of,
    light,
    play,
    told,
    vllm_params,
)


@pytest.fixture(params=[pytest.param(light, id="light"), *vllm_params("plain", "streaming", "decode")])
def make(request: pytest.FixtureRequest) -> Make:
    chosen: Make = request.param
    return chosen


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
