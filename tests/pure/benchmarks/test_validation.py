"""What a cluster that computes is loaded with, and what is made of what its clients saw."""

import random
from pathlib import Path

import pytest

from benchmarks.quiet import taken_s
from benchmarks.validation.cluster import Timed
from benchmarks.validation.measure import LOADS, prompts_of, seen
from cluster_sim.costs import catalog
from cluster_sim.costs.step_work import StepWork, prefill_work
from tests.fakes.measured_cluster import LATENCY_S, S_PER_TOKEN, cluster, decode_s, measured, model_file, prefill_s


def test_cost_model_says_what_was_measured(tmp_path: Path) -> None:
    model = catalog.load(str(model_file(tmp_path, measured())))
    for tokens in (32, 1024, 3500):
        assert model.step_s(prefill_work([(0, tokens)])) == pytest.approx(prefill_s(tokens))
    for batch, context in ((1, 64), (4, 1024), (16, 64)):
        work = StepWork(decode_requests=batch, context_tokens=batch * context, distinct_tokens=batch * context)
        assert model.step_s(work) == pytest.approx(decode_s(batch, batch * context))
    assert model.network_latency_s == pytest.approx(LATENCY_S, rel=0.02)
    assert model.kv_bytes_per_token / model.network_bytes_per_s == pytest.approx(S_PER_TOKEN, rel=0.02)
    assert model.device_tokens == 1024 * 32


@pytest.mark.parametrize("name", [name for name, load in LOADS.items() if load.share])
def test_loads_ask_for_their_share_of_the_prefill_worker(name: str) -> None:
    load, found = LOADS[name], measured()
    rates = []
    for seed in range(8):
        prompts = prompts_of(load, found, cluster(), random.Random(seed))
        work_s = sum(prefill_s(len(each.token_ids) - load.shared_tokens) for each in prompts)
        rates.append(work_s / prompts[-1].at_s)
    assert sum(rates) / len(rates) == pytest.approx(load.share, rel=0.25)


def test_bursty_prompts_share_their_groups_prefix() -> None:
    prompts = prompts_of(LOADS["bursty"], measured(), cluster(), random.Random(1))
    prefixes = {each.token_ids[: LOADS["bursty"].shared_tokens] for each in prompts}
    assert len(prefixes) == LOADS["bursty"].groups
    assert len({each.token_ids for each in prompts}) == len(prompts)


def test_what_clients_saw_becomes_figures() -> None:
    timed = [Timed(0.0, 10, [0.1, 0.2, 0.3]), Timed(1.0, 10, [1.3, 1.5, 2.0])]
    figures = seen(timed)
    assert figures["ttft_mean_ms"] == pytest.approx(200)
    assert figures["e2e_mean_ms"] == pytest.approx(650)
    assert figures["throughput_tokens_per_s"] == pytest.approx(3.0)


def test_foreign_load_counts_what_processes_have_taken_since() -> None:
    assert taken_s({1: 5.0, 2: 1.0}, {1: 6.0, 3: 0.5}) == 1.5
