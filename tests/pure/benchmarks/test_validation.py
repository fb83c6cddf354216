"""Predictions against measurements: a made-up cluster whose figures are known is predicted as it was measured."""

import json
import random
from pathlib import Path
from typing import Any, cast

import pytest

from benchmarks.quiet import taken_s
from benchmarks.validation import measure as validation
from benchmarks.validation import model as validation_model
from benchmarks.validation.cluster import BatchPoint, Cluster, Measured, Prompt, PromptPoint, Timed
from benchmarks.validation.measure import LOADS, Comparison, compared, prompts_of, seen
from cluster_configs.schema import PlacementSection, RachisConfig
from cluster_sim.costs import catalog
from cluster_sim.costs.step_work import StepWork, prefill_work

_HOP_S, _LATENCY_S, _S_PER_TOKEN, _STEP_S = 0.001, 0.004, 1e-6, 0.003
CONFIG = RachisConfig(placement=PlacementSection(disaggregation="always"))


def prefill_s(tokens: int) -> float:
    return 0.005 + 3e-5 * tokens + 1e-8 * tokens * tokens / 2


def decode_s(batch: int, context_tokens: float) -> float:
    return _STEP_S + 0.0002 * (batch - 1) + 2e-7 * context_tokens


def gap_s(tokens: int) -> float:
    return 2 * _HOP_S + _LATENCY_S + _S_PER_TOKEN * tokens + 2 * decode_s(1, tokens)


def measured(prefill_slowdown: float = 1.0, decode_slowdown: float = 1.0) -> Measured:
    return Measured(
        tuple(
            PromptPoint(each, prefill_s(each), prefill_s(each) + 2 * _HOP_S, gap_s(each))
            for each in (32, 256, 1024, 2048, 3500)
        ),
        tuple(
            BatchPoint(batch, batch * context, decode_s(batch, batch * context))
            for batch in (1, 4, 16)
            for context in (64, 1024)
        ),
        prefill_slowdown,
        decode_slowdown,
    )


def cluster() -> Cluster:
    return Cluster(cast(Any, None), 1000, 0, lambda: None)


def model_file(folder: Path, found: Measured) -> Path:
    file = folder / "measured.json"
    validation_model.write(validation_model.cost_model(found, CONFIG), file)
    return file


def test_cost_model_says_what_was_measured(tmp_path: Path) -> None:
    model = catalog.load(str(model_file(tmp_path, measured())))
    for tokens in (32, 1024, 3500):
        assert model.step_s(prefill_work([(0, tokens)])) == pytest.approx(prefill_s(tokens))
    for batch, context in ((1, 64), (4, 1024), (16, 64)):
        work = StepWork(decode_requests=batch, context_tokens=batch * context, distinct_tokens=batch * context)
        assert model.step_s(work) == pytest.approx(decode_s(batch, batch * context))
    assert model.network_latency_s == pytest.approx(_LATENCY_S, rel=0.02)
    assert model.kv_bytes_per_token / model.network_bytes_per_s == pytest.approx(_S_PER_TOKEN, rel=0.02)
    assert model.device_tokens == 1024 * 32


@pytest.mark.parametrize("tokens", [256, 1024])
def test_request_at_no_load_is_predicted_as_it_was_measured(tmp_path: Path, tokens: int) -> None:
    prompts = [Prompt(float(number), cluster().fresh(tokens), 8) for number in range(3)]
    # Of one seed: the same prompt again would be cached.
    prompts = [Prompt(each.at_s, (number, *each.token_ids[1:]), 8) for number, each in enumerate(prompts)]
    timed = [Timed(each.at_s, tokens) for each in prompts]
    found = measured()
    figures = validation_model.simulate(model_file(tmp_path, found), found, CONFIG, prompts, timed)
    ttft_s = prefill_s(tokens) + 2 * _HOP_S
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


@pytest.mark.parametrize("name", [name for name, load in LOADS.items() if load.share])
def test_loads_ask_for_their_share_of_the_prefill_worker(name: str) -> None:
    load, found = LOADS[name], measured()
    rates = []
    for seed in range(20):
        prompts = prompts_of(load, found, cluster(), random.Random(seed))
        work_s = sum(prefill_s(len(each.token_ids) - load.shared_tokens) for each in prompts)
        rates.append(work_s / prompts[-1].at_s)
    assert sum(rates) / len(rates) == pytest.approx(load.share, rel=0.25)


def test_bursty_prompts_share_their_groups_prefix() -> None:
    prompts = prompts_of(LOADS["bursty"], measured(), cluster(), random.Random(1))
    prefixes = {each.token_ids[: LOADS["bursty"].shared_tokens] for each in prompts}
    assert len(prefixes) == LOADS["bursty"].groups
    assert len({each.token_ids for each in prompts}) == len(prompts)


def test_comparison_is_of_medians_and_knows_its_tolerance() -> None:
    def figures(value: float) -> dict[str, float]:
        return dict.fromkeys(validation.FIGURES, value)

    good, *_ = compared(
        "light", [(figures(9.0), figures(10.0)), (figures(11.0), figures(10.0)), (figures(90), figures(1))]
    )
    assert (good.predicted, good.measured, good.ratio, good.within) == (11.0, 10.0, 1.1, True)
    assert not Comparison("light", "e2e", 8.4, 10.0).within
    assert not Comparison("light", "e2e", 11.6, 10.0).within
    assert [row[-1] for row in validation.table([good, Comparison("light", "e2e", 2.0, 1.0)])] == ["yes", "no"]
    assert json.loads(json.dumps(good.as_json()))["ratio"] == 1.1


def test_what_clients_saw_becomes_figures() -> None:
    timed = [Timed(0.0, 10, [0.1, 0.2, 0.3]), Timed(1.0, 10, [1.3, 1.5, 2.0])]
    figures = seen(timed)
    assert figures["ttft_mean_ms"] == pytest.approx(200)
    assert figures["e2e_mean_ms"] == pytest.approx(650)
    assert figures["throughput_tokens_per_s"] == pytest.approx(3.0)


def test_foreign_load_counts_what_processes_have_taken_since() -> None:
    assert taken_s({1: 5.0, 2: 1.0}, {1: 6.0, 3: 0.5}) == 1.5


def test_no_load_check_notices_a_hop_that_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above."""
    monkeypatch.setattr(validation_model, "hop_s", lambda found: 0.0)
    with pytest.raises(AssertionError):
        test_request_at_no_load_is_predicted_as_it_was_measured(tmp_path, 256)
