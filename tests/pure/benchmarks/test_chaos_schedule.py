"""What `rachis chaos` draws from a seed."""

import itertools

import pytest

from benchmarks.chaos_schedule import _PAUSE_AFTER_KILL_S, _QUIET_S, schedule

SEEDS = range(50)


def test_the_same_seed_draws_the_same_faults_and_another_one_others() -> None:
    assert schedule(600.0, 1) == schedule(600.0, 1)
    assert schedule(600.0, 1) != schedule(600.0, 2)


@pytest.mark.parametrize("seed", SEEDS)
def test_faults_come_one_after_the_other_and_are_over_before_it_is_looked_for_leaks(seed: int) -> None:
    faults = schedule(300.0, seed)
    assert faults
    for before, after in itertools.pairwise(faults):
        assert before.at_s + before.for_s < after.at_s
    assert max(fault.at_s for fault in faults) < 300.0 - _QUIET_S


@pytest.mark.parametrize("seed", SEEDS)
def test_a_pool_loses_no_second_worker_and_the_service_no_second_router_before_the_first_is_back(seed: int) -> None:
    last: dict[str, float] = {}
    for fault in schedule(1200.0, seed):
        if fault.kind == "kill":
            kept = "router" if fault.target == "service" else fault.target
            if kept in last:
                assert fault.at_s - last[kept] >= _PAUSE_AFTER_KILL_S[fault.target]
            last[kept] = fault.at_s


def test_every_kind_of_process_is_frozen_and_killed_and_redis_is_emptied() -> None:
    drawn = {(fault.kind, fault.target) for seed in SEEDS for fault in schedule(600.0, seed)}
    assert drawn == {
        *(("freeze", target) for target in ("prefill", "decode", "router", "service", "redis")),
        *(("kill", target) for target in ("prefill", "decode", "router", "service", "redis")),
        ("flush", "redis"),
    }
