"""Predictions against measurements: a made-up cluster whose figures are known is predicted as it was measured."""

from pathlib import Path

import pytest

from benchmarks.validation import model as validation_model
from benchmarks.validation.cluster import Prompt, Timed
from benchmarks.validation.imitated import SETTINGS
from benchmarks.validation.loads import WORKLOADS, drawn
from benchmarks.validation.simulated import EngineKind, costs_of, simulated, workers_of
from benchmarks.validation.software import Software
from cluster_configs import loading
from tests.fakes.measured_cluster import CONFIG, HOP_S, cluster, decode_s, gap_s, measured, model_file, prefill_s
from tests.planting import planted

pytestmark = pytest.mark.integration

KINDS: tuple[EngineKind, ...] = ("vllm", "light")


@pytest.mark.parametrize("tokens", [256, 1024])
def test_request_at_no_load_is_predicted_as_it_was_measured(tmp_path: Path, tokens: int) -> None:
    prompts = [Prompt(float(number), cluster().fresh(tokens), 8) for number in range(3)]
    # Of one seed: the same prompt again would be cached.
    prompts = [Prompt(each.at_s, (number, *each.token_ids[1:]), 8) for number, each in enumerate(prompts)]
    timed = [Timed(each.at_s, tokens) for each in prompts]
    found = measured()
    figures = validation_model.simulate(model_file(tmp_path, found), found, CONFIG, prompts, timed)
    ttft_s = prefill_s(tokens) + 2 * HOP_S
    assert figures.finished == 3
    assert figures.ttft_s.mean == pytest.approx(ttft_s, rel=0.03)
    assert figures.e2e_s.mean == pytest.approx(ttft_s + gap_s(tokens) + 6 * decode_s(1, tokens), rel=0.05)


def test_workers_that_share_cores_slow_each_other_down(tmp_path: Path) -> None:
    """Prompts are computed while others are answered."""
    drawn = cluster()
    prompts = [Prompt(number * 0.03, drawn.fresh(512), 32) for number in range(20)]
    timed = [Timed(each.at_s, 512) for each in prompts]
    file = model_file(tmp_path, measured())
    alone = validation_model.simulate(file, measured(), CONFIG, prompts, timed)
    shared = validation_model.simulate(file, measured(1.5, 2.0), CONFIG, prompts, timed)
    assert shared.ttft_s.mean > 1.2 * alone.ttft_s.mean
    assert shared.tpot_s.mean > 1.3 * alone.tpot_s.mean
    assert validation_model.simulate(file, measured(), CONFIG, prompts, timed).ttft_s.mean == alone.ttft_s.mean


def test_no_load_check_notices_a_hop_that_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above."""
    planted(monkeypatch, validation_model, "hop_s", lambda found: 0.0)
    with pytest.raises(AssertionError):
        test_request_at_no_load_is_predicted_as_it_was_measured(tmp_path, 256)


def test_vllms_schedulers_live_through_the_same_as_the_light_engine() -> None:
    """One worker of each pool, and room for all: what is found in a cache is no matter of either."""
    config = loading.load(flags={**SETTINGS, "pools.prefill.workers": 1, "pools.decode.workers": 1}).config
    costs, workers = costs_of(config), workers_of(config)
    runs = [
        drawn(WORKLOADS[name], 0.2, 10.0, costs, workers, 32, seed)
        for seed, name in enumerate(("long_answers", "retrieval"))
    ]
    vllm, light = (simulated(config, Software(0.002, 0.004, 0.0), runs, 0, kind) for kind in KINDS)
    for one, other in zip(vllm, light, strict=True):
        assert one["hit_ratio"] == other["hit_ratio"]
        assert one["throughput_tokens_per_s"] == pytest.approx(other["throughput_tokens_per_s"], rel=0.02)
        assert one["ttft_p50_ms"] == pytest.approx(other["ttft_p50_ms"], rel=0.1)
