"""Feather's experiment with vLLM's real schedulers."""

from dataclasses import replace

import pytest

from benchmarks.papers import feather, feather_runs
from benchmarks.papers.feather_runs import CACHE, FCFS, MEMORY, Load

pytestmark = pytest.mark.integration

SMALL = Load(groups=2, shared_tokens=3200, decode_tokens=100, rate=40.0)


def test_schedulers_run_and_batches_that_share_are_faster_where_mixing_costs() -> None:
    """vLLM's real schedulers: the stop policy forms batches of one prefix, and order of arrival does not."""
    mixed = feather_runs.simulate(SMALL, FCFS, MEMORY, 2.0)
    alike = feather_runs.simulate(SMALL, feather.FEATHER, MEMORY, 2.0)
    assert alike.tbt_ms < 0.7 * mixed.tbt_ms
    assert alike.mean_batch < mixed.mean_batch
    assert feather_runs.simulate(SMALL, FCFS, MEMORY, 2.0) == mixed


def test_leaps_while_requests_wait_change_nothing_for_order_of_arrival() -> None:
    """A burst of more than fit: each waits for a place, or for memory, and gets it at about the same time (blocks are
    taken later in a leap, so that others are evicted)."""
    from cluster_sim.engines.vllm_engine import VllmSimEngine
    from cluster_sim.engines.vllm_schedulers import SchedulerKind, VllmEngineSettings

    def told(*, leaps: bool, device_blocks: int) -> tuple[list[tuple[int, str, float]], int]:
        settings = VllmEngineSettings(
            SchedulerKind.PLAIN, 16, device_blocks, max_running_requests=8, tiers=None, leaps=leaps
        )
        engine = VllmSimEngine(feather_runs.cost_model(feather_runs.LLAMA, CACHE), settings)
        for place, (_, job) in enumerate(replace(SMALL, shared_tokens=320, decode_tokens=50).jobs(1.0, seed=0)):
            engine.add(replace(job, output_tokens=20 + place % 7 * 13), 0.0)
        found, turns = [], 0
        while engine.next_s() < 1e9:
            turns += 1
            found += [(each.job.number, each.kind.value, each.at_s) for each in engine.advance(engine.next_s())]
        engine.check_invariants()
        return found, turns

    for device_blocks in (400, 60):
        (leaping, turns), (stepping, more_turns) = (
            told(leaps=leaps, device_blocks=device_blocks) for leaps in (True, False)
        )
        assert [each[:2] for each in leaping] == [each[:2] for each in stepping] and len(leaping) > 60
        assert [at_s for *_, at_s in leaping] == pytest.approx([at_s for *_, at_s in stepping], rel=0.002)
        assert turns < more_turns
