"""FEATHER in the simulator: what a step costs under each model of locality, and which cells come of the runs."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.papers import feather, feather_runs
from benchmarks.papers.feather_runs import CACHE, CASCADE, FCFS, LOCALITIES, MEMORY, Load, LocalityCosts, Ran
from cluster_sim.costs.step_work import StepWork

SMALL = Load(groups=2, shared_tokens=3200, decode_tokens=100, rate=40.0)


class _Counting:
    """Takes a second for each distinct token, a thousandth for one that is read again, a millionth for a pair."""

    name = "counting"

    def step_s(self, work: StepWork) -> float:
        again = work.context_tokens - work.distinct_tokens
        return work.distinct_tokens + again / 1e3 + work.prefill_pairs / 1e6


def _costs(common: int, *, caches_mixed: bool = True, heads: int = 32, kv_heads: int = 8) -> LocalityCosts:
    costs = LocalityCosts(_Counting(), heads, kv_heads, 142, caches_mixed=caches_mixed)  # type: ignore[arg-type]
    costs.common_tokens = lambda: common
    return costs


def _batch(requests: int, shared: int, own: int) -> StepWork:
    return StepWork(0, 0.0, requests, requests * (shared + own), shared + requests * own)


def test_with_cascade_attention_a_prefix_of_all_is_read_once_and_computed_for_each() -> None:
    work = _batch(100, 5000, 50)
    assert _costs(5000).step_s(work) == pytest.approx(10_000 + 500_000 / 1e6)
    assert _costs(0).step_s(work) == pytest.approx(10_000 + 495_000 / 1e3)
    assert _costs(0, caches_mixed=False).step_s(work) == 505_000
    assert _costs(5000, caches_mixed=False).step_s(work) == _costs(5000).step_s(work)


@pytest.mark.parametrize(
    ("requests", "common", "only_decodes", "heads_per_kv", "uses"),
    [
        (7, 5000, True, 4, False),
        (500, 255, True, 4, False),
        (500, 256, True, 4, True),
        # One round over 40 tiles against the tiles of each request spread over the multiprocessors.
        (17, 5120, True, 4, False),
        (18, 5120, True, 4, True),
        # The kernel that splits the prefix is not for these.
        (8, 5000, False, 4, True),
        (8, 5000, True, 1, True),
    ],
)
def test_cascade_attention_is_used_where_vllm_used_it(
    requests: int, common: int, only_decodes: bool, heads_per_kv: int, uses: bool
) -> None:
    costs = _costs(0, kv_heads=32 // heads_per_kv)
    assert costs.uses_cascade(requests, common, only_decodes=only_decodes) is uses


def test_other_figures_are_those_of_the_model_beneath() -> None:
    base = feather_runs.cost_model(feather_runs.LLAMA, CACHE)
    for locality in (CASCADE, MEMORY):
        assert feather_runs.cost_model(feather_runs.LLAMA, locality).device_tokens == base.device_tokens
    assert feather_runs.cost_model(feather_runs.LONGCHAT, CACHE).device_tokens < base.device_tokens / 5


def test_a_divergent_request_is_a_cliff_for_cascade_attention_alone() -> None:
    steps = {
        locality: [
            feather_runs.decode_step_s(locality, 500, 500 * 10_045, distinct, common)
            for distinct, common in ((32_500, 10_000), (42_500, 0))
        ]
        for locality in LOCALITIES
    }
    jumps = {locality: mixed / alike for locality, (alike, mixed) in steps.items()}
    assert jumps[CACHE] < 1.05
    assert 2 < jumps[CASCADE] < jumps[MEMORY]


def test_arrivals_are_poisson_and_share_by_group() -> None:
    load = replace(SMALL, groups=3, rate=200.0)
    arrivals = list(load.jobs(10.0, seed=1))
    times = np.array([at_s for at_s, _ in arrivals])
    assert len(arrivals) == pytest.approx(2000, rel=0.1)
    assert np.diff(times).std() == pytest.approx(np.diff(times).mean(), rel=0.1)
    shared = load.shared_tokens // 16
    groups = Counter(job.keys[:shared].tobytes() for _, job in arrivals)
    assert len(groups) == 3 and min(groups.values()) > 550
    assert len({job.keys[shared:].tobytes() for _, job in arrivals}) == len(arrivals)
    again = list(load.jobs(10.0, seed=1))
    assert [at_s for at_s, _ in again] == list(times)
    assert all(np.array_equal(one.keys, other.keys) for (_, one), (_, other) in zip(arrivals, again, strict=True))


def test_without_groups_nobody_shares() -> None:
    jobs = [job for _, job in replace(SMALL, groups=0).jobs(3.0, seed=0)]
    keys = np.concatenate([job.keys for job in jobs])
    assert len(np.unique(keys)) == len(keys)


def _made_up(load: Load, policy: str, locality: str, seconds: float, seed: int = 0) -> Ran:
    faster = 1.0 if policy == FCFS or locality == CACHE or load.groups < 2 else 4.0
    return Ran(1000.0 * faster, 500.0 / faster, 100.0 / faster)


def test_every_cell_comes_under_each_locality_and_runs_are_shared() -> None:
    made: Counter[tuple[Load, str, str, float]] = Counter()

    def simulate(load: Load, policy: str, locality: str, seconds: float, seed: int = 0) -> Ran:
        made[load, policy, locality, seconds] += 1
        return _made_up(load, policy, locality, seconds, seed)

    told: list[str] = []
    cells = feather.run(told.append, quick=False, simulated=simulate)
    assert set(made.values()) == {1} and len(told) == len(made)
    names = [(each.figure, each.cell) for each in cells]
    assert len(set(names)) == len(names)
    # Whom a policy is compared with ran as long.
    assert {(load, seconds) for load, policy, _, seconds in made if policy != FCFS} <= {
        (load, seconds) for load, policy, _, seconds in made if policy == FCFS
    }
    for locality in LOCALITIES:
        assert len([cell for _, cell in names if cell.endswith(f", {locality}")]) == len(cells) / 3
    gains = {each.cell: each for each in cells if each.figure.startswith("Figure 5.1")}
    assert gains["100 requests/s, throughput, memory"].ratio == pytest.approx(1.0)
    assert gains["100 requests/s, throughput, cache"].ours == 1.0
    assert gains["100 requests/s, throughput, cache"].why != gains["100 requests/s, throughput, memory"].why


def test_the_quick_variant_is_a_part_of_the_whole() -> None:
    whole = {(each.figure, each.cell) for each in feather.run(lambda text: None, quick=False, simulated=_made_up)}
    quick = {(each.figure, each.cell) for each in feather.run(lambda text: None, quick=True, simulated=_made_up)}
    assert quick < whole
    assert {figure.split(",")[0] for figure, _ in whole} >= {f"Figure 5.{number}" for number in (1, 2, 3, 4, 7, 14)}
