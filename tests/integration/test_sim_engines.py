"""Simulated engines around vLLM's real schedulers: what they do beyond the contract of all simulated engines."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cluster_core.engine_jobs import SessionMode
from cluster_sim.engines.engine import SimEngine, SimInput, SimJob
from tests.fakes.sim_engines import (
    FINISHED,
    FIRST,
    REFUSED,
    Make,
    drain,
    job,
    keys_of,
    on_vllm,
    play,
    told,
    vllm_params,
)


@pytest.fixture(params=vllm_params("plain", "streaming", "decode"))
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
    # How often vLLM's scheduler runs is visible nowhere else.
    schedule = engine._scheduler.schedule

    def counting() -> Any:
        nonlocal counted
        counted += 1
        return schedule()

    # The counting one, in its place.
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
    engine = on_vllm(kind)(blocks=20, host_blocks=100, tiers=tiers)
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
def test_a_step_that_goes_on_with_nothing_takes_its_start_and_others_do_not() -> None:
    """Two prompts one after the other, a pause, and one more; each has further steps of its own."""

    def ends_s(step_start_s: float) -> list[float]:
        engine = on_vllm("plain")(step_start_s=step_start_s, max_running_requests=1)
        for number, now_s in ((1, 0.0), (2, 0.0), (3, 5.0)):
            engine.add(job(number, 64, 4), now_s)
        return [each.at_s for each in drain(engine) if each.kind is FINISHED]

    without, with_it = ends_s(0.0), ends_s(0.5)
    assert [late - early for early, late in zip(without, with_it, strict=True)] == pytest.approx([0.5, 1.0, 0.5])


@pytest.mark.integration
def test_a_miscounted_block_is_noticed() -> None:
    engine: Any = on_vllm("plain")()
    engine.add(job(1, 100, 1, hand_off=True), 0.0)
    drain(engine)
    # Planted: a block of vLLM's pool is taken and not counted.
    engine._scheduler.kv_cache_manager.block_pool.get_new_blocks(1)
    with pytest.raises(AssertionError):
        engine.check_invariants()


@pytest.mark.integration
def test_the_clock_of_the_process_is_its_own_again() -> None:
    import time

    real = time.monotonic
    engine = on_vllm("decode")()
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


_sessions = on_vllm("streaming")


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
