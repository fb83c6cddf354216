"""The guard on scripted engines: how fast it falls back, how little it probes, and when it says nothing."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_worker.throughput_guard import GuardSettings, Mode, ThroughputGuard
from tests.examples import examples

POLICY, PROBE, FALLBACK = Mode.POLICY, Mode.PROBE, Mode.FALLBACK
STEP_S = 0.1


@dataclass
class Engine:
    """Steps of `step_s`. rate: decode tokens per second in a mode at a time; contended: whether requests waited."""

    guard: ThroughputGuard
    rate: Callable[[Mode, float], float]
    contended: Callable[[Mode, float], bool] = lambda mode, now_s: True
    now_s: float = 0.0
    step_s: float = STEP_S
    spent_s: defaultdict[Mode, float] = field(default_factory=lambda: defaultdict(float))
    changes: list[tuple[float, Mode]] = field(default_factory=list)

    def run(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            mode = self.guard.mode(self.now_s)
            if not self.changes or self.changes[-1][1] is not mode:
                self.changes.append((self.now_s, mode))
            started_s, self.now_s = self.now_s, self.now_s + self.step_s
            self.spent_s[mode] += self.step_s
            tokens = round(self.rate(mode, started_s) * self.step_s)
            self.guard.executed(self.now_s, tokens, self.step_s, self.contended(mode, started_s))

    def begins(self, mode: Mode) -> list[float]:
        return [at_s for at_s, each in self.changes if each is mode]


def constant(policy: float, by_arrival: float) -> Callable[[Mode, float], float]:
    return lambda mode, now_s: policy if mode is POLICY else by_arrival


def guard(**given: float | bool) -> ThroughputGuard:
    return ThroughputGuard(GuardSettings(**given))  # type: ignore[arg-type]


def test_a_probe_measures_the_policy_settles_and_measures_order_of_arrival() -> None:
    engine = Engine(guard(), constant(3000, 2000))
    engine.run(40)
    [(_, start), (probe_s, probe), (back_s, back)] = engine.changes
    assert (start, probe, back) == (POLICY, PROBE, POLICY)
    assert probe_s == pytest.approx(30 + 1, abs=1.5 * STEP_S)
    assert back_s - probe_s == pytest.approx(1 + 1, abs=1.5 * STEP_S)
    assert (engine.guard.probes, engine.guard.fallbacks) == (1, 0)
    assert engine.guard.last_ratio == pytest.approx(1.5)


def test_what_settles_does_not_count() -> None:
    """The requests of the policy make the first second of a probe as fast as the policy."""
    engine = Engine(guard(), lambda mode, now_s: 3000 if mode is POLICY or now_s < 31.9 else 2000)
    engine.run(40)
    assert engine.guard.last_ratio == pytest.approx(1.5)


def test_a_policy_that_wins_is_probed_less_and_less_down_to_one_percent_of_the_time() -> None:
    engine = Engine(guard(), constant(3000, 2000))
    engine.run(3600)
    probes = engine.begins(PROBE)
    assert [round(later - earlier) for earlier, later in pairwise(probes)][:5] == [
        63,
        123,
        243,
        243,
        243,
    ]
    assert engine.spent_s[PROBE] <= 0.011 * 3600
    assert engine.guard.fallbacks == 0


def test_a_policy_that_makes_no_difference_is_probed_in_each_interval() -> None:
    engine = Engine(guard(), constant(2000, 2000))
    engine.run(1000)
    assert engine.guard.probes == 1000 // 33
    assert engine.guard.fallbacks == 0


@pytest.mark.parametrize("policy", [1900, 1500, 500])
def test_a_policy_that_loses_is_left_after_two_probes(policy: float) -> None:
    engine = Engine(guard(), constant(policy, 2000))
    engine.run(60)
    [fallback_s] = engine.begins(FALLBACK)
    assert engine.guard.probes == 2
    assert fallback_s < 45


def test_the_fallback_doubles_to_a_bound_and_a_losing_policy_costs_little_in_the_long_run() -> None:
    engine = Engine(guard(), constant(1500, 2000), step_s=2 * STEP_S)
    engine.run(6000)
    starts = engine.begins(FALLBACK)
    lengths = [next(at_s for at_s, _ in engine.changes if at_s > start_s) - start_s for start_s in starts[:7]]
    assert [round(each) for each in lengths] == [60, 120, 240, 480, 960, 960, 960]
    before = engine.spent_s.copy()
    engine.run(6000)
    assert engine.spent_s[POLICY] - before[POLICY] < 0.02 * 6000


def test_after_a_fallback_one_lost_probe_is_enough() -> None:
    engine = Engine(guard(), constant(1500, 2000))
    engine.run(130)
    assert (engine.guard.fallbacks, engine.guard.probes) == (2, 3)


@pytest.mark.parametrize("late", [0.5, 0.9])
def test_traffic_that_turns_against_the_policy_makes_a_fallback_within_minutes(late: float) -> None:
    engine = Engine(guard(), lambda mode, now_s: 2000 * ((3.0 if now_s < 1000 else late) if mode is POLICY else 1.0))
    engine.run(1000)
    assert engine.guard.fallbacks == 0
    engine.run(8 * 30 + 70)
    assert engine.guard.fallbacks > 0


def test_traffic_that_turns_in_favour_of_the_policy_ends_the_fallbacks_and_they_begin_short_again() -> None:
    rates = {0: 0.8, 1000: 1.5, 4000: 0.8}
    engine = Engine(guard(), lambda mode, now_s: 2000 * (_at(rates, now_s) if mode is POLICY else 1.0))
    engine.run(4000)
    last_s = engine.begins(FALLBACK)[-1]
    assert last_s < 1000
    assert engine.guard.mode(engine.now_s) is POLICY
    engine.run(600)
    first_s = next(at_s for at_s in engine.begins(FALLBACK) if at_s > 4000)
    assert next(at_s for at_s, _ in engine.changes if at_s > first_s) - first_s == pytest.approx(60, abs=1.5 * STEP_S)


def test_one_lost_probe_among_others_makes_no_fallback() -> None:
    engine = Engine(guard(), lambda mode, now_s: 2000 if mode is POLICY else 2500 if now_s < 35 else 2000)
    engine.run(2000)
    assert engine.guard.fallbacks == 0
    first, second, third = engine.begins(PROBE)[:3]
    assert second - first < 12 < 30 < third - second


@pytest.mark.parametrize("early", [2.0, 20.0])
def test_two_lost_probes_after_much_better_ones_wait_for_the_smoothed_ratio_to_agree(early: float) -> None:
    """However much better those were."""
    rates = {0: early, 500: 0.9}
    engine = Engine(guard(), lambda mode, now_s: 2000 * (_at(rates, now_s) if mode is POLICY else 1.0))
    engine.run(1000)
    lost = [at_s for at_s in engine.begins(PROBE) if 500 < at_s < engine.begins(FALLBACK)[0]]
    assert len(lost) == 4


def test_without_requests_that_wait_nothing_is_probed() -> None:
    engine = Engine(guard(), constant(500, 2000), contended=lambda mode, now_s: False)
    engine.run(500)
    assert engine.spent_s == {POLICY: pytest.approx(500, abs=1.5 * STEP_S)}
    assert engine.guard.last_ratio is None


def test_too_few_steps_with_a_choice_make_no_probe() -> None:
    engine = Engine(guard(), constant(500, 2000), contended=lambda mode, now_s: now_s % 1 < 0.2)
    engine.run(500)
    assert PROBE not in engine.spent_s


def test_order_of_arrival_that_admits_all_is_compared_where_its_batch_is_as_large() -> None:
    engine = Engine(guard(), constant(1500, 2000), contended=lambda mode, now_s: mode is POLICY)
    engine.run(60)
    assert engine.guard.last_ratio == pytest.approx(0.75)
    assert engine.guard.fallbacks == 1


def test_a_probe_in_which_the_load_ends_says_nothing() -> None:
    """Three requests are left in the batch: slow, but not because of the order."""
    engine = Engine(guard(), constant(1500, 150), contended=lambda mode, now_s: mode is POLICY)
    engine.run(500)
    assert (engine.guard.probes, engine.guard.last_ratio) == (0, None)
    assert 0 < engine.spent_s[PROBE] < 0.13 * 500


def test_steps_without_tokens_or_time_count_for_nothing() -> None:
    it = guard()
    for now in range(1000):
        assert it.mode(now / 10) is POLICY
        it.executed(now / 10, 0, 0.1, contended=True)
        it.executed(now / 10, 10, 0.0, contended=True)


def test_an_idle_engine_leaves_every_mode_but_the_policys() -> None:
    it = guard()
    engine = Engine(it, constant(1500, 2000))
    engine.run(31.5)
    assert it.mode(engine.now_s) is PROBE
    later = [it.mode(engine.now_s + hours * 3600) for hours in (1, 2, 3)]
    assert later == [POLICY, POLICY, POLICY]
    assert it.probes == 0


def test_a_fallback_ends_while_the_engine_is_idle() -> None:
    engine = Engine(guard(), constant(1500, 2000))
    engine.run(60)
    assert [engine.guard.mode(engine.now_s + seconds) for seconds in (0, 100)] == [FALLBACK, POLICY]


def test_a_guard_that_is_off_leaves_all_to_the_policy() -> None:
    engine = Engine(guard(enabled=False), constant(500, 2000))
    engine.run(500)
    assert set(engine.spent_s) == {POLICY}
    assert engine.guard.probes == 0


@examples(100, few=5)
@given(seed=st.integers(0, 2**32), spread=st.floats(0, 2), busy=st.floats(0, 1))
def test_whatever_is_measured_probes_take_less_than_a_quarter_of_the_time(
    seed: int, spread: float, busy: float
) -> None:
    rng = Random(seed)
    levels = [2000 * 2 ** rng.uniform(-spread, spread) for _ in range(500)]
    engine = Engine(
        guard(),
        lambda mode, now_s: levels[(int(now_s) * 3 + (mode is POLICY)) % 500],
        contended=lambda mode, now_s: rng.random() < busy,
    )
    engine.run(300)
    assert engine.spent_s[PROBE] <= 0.25 * 300
    assert engine.guard.probes <= len(engine.begins(PROBE))
    assert engine.guard.fallbacks == len(engine.begins(FALLBACK))


def _at(rates: dict[int, float], now_s: float) -> float:
    return [rate for since_s, rate in rates.items() if since_s <= now_s][-1]
