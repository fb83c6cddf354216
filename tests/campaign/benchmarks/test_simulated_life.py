"""The simulated life of a service: what is taken of it run by run."""

from dataclasses import replace

import pytest

from benchmarks.validation.cluster import Timed
from benchmarks.validation.imitated import SETTINGS, Measurement, Replayed, judged
from benchmarks.validation.loads import WORKLOADS, drawn
from benchmarks.validation.simulated import simulated, workers_of
from benchmarks.validation.software import Software
from cluster_configs import loading
from cluster_sim.workloads.requests import SimRequest
from tests.fakes.imitated_service import COSTS, point

ALONE = {"pools.prefill.workers": 1, "pools.decode.workers": 1}
CONFIG = loading.load(flags={**SETTINGS, **ALONE}).config
SOFTWARE = Software(0.002, 0.004, 0.001)
POINTS = [point(tokens, SOFTWARE.hop_s, SOFTWARE.pull_s, SOFTWARE.step_start_s) for tokens in (32, 1024, 3500)]


def requests(workload: str, seed: int) -> list[SimRequest]:
    return drawn(WORKLOADS[workload], 0.3, 15.0, COSTS, workers_of(CONFIG), 32, seed)


def hit_ratio(sent: list[SimRequest]) -> float:
    """With one worker, room for all, and prompts that are told apart by whole blocks."""
    seen, found = set[int](), 0
    for each in sent:
        keys = each.keys.tolist()
        hits = next((place for place, key in enumerate(keys) if key not in seen), len(keys))
        found += min(hits * 32, (each.prompt_tokens - 1) // 32 * 32)
        seen.update(keys)
    return found / sum(each.prompt_tokens for each in sent)


def test_each_run_of_a_life_has_its_own_figures() -> None:
    runs = [requests(name, seed) for seed, name in enumerate(("long_answers", "long_prompts", "retrieval"))]
    life = simulated(CONFIG, SOFTWARE, runs, 0, "light")
    assert [run["hit_ratio"] for run in life] == [pytest.approx(hit_ratio(runs[0]), abs=0.02), 0.0, 0.0]
    assert life == simulated(CONFIG, SOFTWARE, runs, 0, "light")
    for run, figures in zip(runs, life, strict=True):
        tokens = sum(each.output_tokens for each in run)
        whole_s = max(each.complete_s for each in run) - run[0].arrival_s
        assert whole_s < tokens / figures["throughput_tokens_per_s"] < whole_s + 30
        assert 0 < figures["ttft_p50_ms"] <= figures["ttft_p90_ms"] <= figures["ttft_p99_ms"]


def test_software_takes_its_time_of_every_request() -> None:
    (fast,) = simulated(CONFIG, Software(0.0, 0.0, 0.0), [requests("long_answers", 1)], 0, "light")
    (slow,) = simulated(CONFIG, Software(0.1, 0.0, 0.0), [requests("long_answers", 1)], 0, "light")
    assert slow["ttft_p50_ms"] > fast["ttft_p50_ms"] + 190
    (late,) = simulated(CONFIG, Software(0.0, 1.6, 0.0), [requests("long_answers", 1)], 0, "light")
    assert late["ttft_p50_ms"] == pytest.approx(fast["ttft_p50_ms"], rel=0.05)
    assert late["tpot_p50_ms"] > fast["tpot_p50_ms"] + 5


def test_a_service_that_is_as_simulated_is_predicted() -> None:
    """The control has every first token a second later."""
    sent = requests("long_answers", 1)
    (figures,) = simulated(CONFIG, SOFTWARE, [sent], 0, "light")

    def told(late_s: float) -> bool:
        ttft_s, tpot_s = figures["ttft_p50_ms"] / 1000 + late_s, figures["tpot_p50_ms"] / 1000
        timed = [
            Timed(
                each.arrival_s,
                each.prompt_tokens,
                [each.arrival_s + ttft_s + tpot_s * place for place in range(each.output_tokens)],
            )
            for each in sent
        ]
        run = Replayed("long_answers", "low", [replace(each, arrival_s=0.0) for each in sent], timed, 0.0)
        found = judged(CONFIG, Measurement(POINTS, [run]), "light")
        within = {each["figure"]: each["within"] for each in found["figures"]}
        assert found["of"] == len(within) == 8
        assert found["within_10_percent"] == sum(within.values())
        return bool(within["ttft_p50_ms"])

    assert told(0.0)
    assert not told(1.0)
