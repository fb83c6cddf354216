"""`rachis bench feather`: its requests, its figures, and what it refuses."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.feather import measure as feather
from benchmarks.feather.measure import Run, binned, figures_of, require_identical, table
from benchmarks.feather.workload import FeatherWorkload, require_model_length
from cluster_configs.loading import LoadedConfig, load
from cluster_core.errors import ConfigError, InvalidInputError, UnavailableError
from command_line.bench.feather_run import POLICIES, SWEEPS, Options, checked

VOCABULARY = 300


def shared(one: list[int], other: list[int]) -> int:
    return next((index for index, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(one))


@pytest.mark.parametrize(
    ("levels", "expected"),
    [
        (1, [[0, 0, 0], [0, 0], [0]]),
        (2, [[50, 50, 50], [50, 50], [50]]),
        (3, [[66, 33, 33], [33, 33], [66]]),
    ],
)
def test_prefixes_form_a_tree(levels: int, expected: list[list[int]]) -> None:
    prefixes = FeatherWorkload(groups=4, shared_tokens=100, levels=levels).prefixes(10**6)
    assert [len(prefix) for prefix in prefixes] == [100] * 4
    common = [[shared(one, other) for other in prefixes[index + 1 :]] for index, one in enumerate(prefixes[:-1])]
    assert common == expected


def test_arrivals_are_poisson_and_prompts_have_a_prefix_and_their_own_end() -> None:
    workload = FeatherWorkload(groups=3, shared_tokens=40, suffix_tokens=8, rate=200.0, seconds=20.0)
    arrivals = workload.arrivals(VOCABULARY)
    times = [at_s for at_s, _ in arrivals]
    assert times == sorted(times)
    assert 0 < times[0] < times[-1] < 20
    assert 3700 < len(arrivals) < 4300
    gaps = [later - earlier for earlier, later in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(mean**2, rel=0.2)
    prefixes = workload.prefixes(VOCABULARY)
    used = [prefixes.index(prompt[:40]) for _, prompt in arrivals]
    assert min(used.count(group) for group in range(3)) > 1000
    assert len({tuple(prompt[40:]) for _, prompt in arrivals}) == len(arrivals)
    assert arrivals == workload.arrivals(VOCABULARY)
    assert arrivals != replace(workload, seed=1).arrivals(VOCABULARY)


def test_nobody_shares_where_there_are_no_groups() -> None:
    prompts = [prompt for _, prompt in FeatherWorkload(groups=0, shared_tokens=40, seconds=2.0).arrivals(10**6)]
    assert max(shared(one, other) for one, other in pairwise(prompts)) == 0


def test_room_for_prefixes_and_requests() -> None:
    workload = FeatherWorkload(groups=5, shared_tokens=100, suffix_tokens=10, decode_tokens=30)
    assert workload.blocks(block_tokens=32, places=4) == 5 * 4 + 2 * 4 * (2 + 1)
    assert replace(workload, groups=0).blocks(32, 4) == 2 * 4 * (5 + 1)
    require_model_length(workload, 140)
    with pytest.raises(InvalidInputError, match="prompt and answer have 140 tokens, the model takes 139"):
        require_model_length(workload, 139)


def run(tokens_per_step: int, steps: int, took_s: float) -> Run:
    series = [((index + 1) * took_s / steps, tokens_per_step) for index in range(steps)]
    return Run(
        series=series,
        gaps_s=[0.01, 0.02, 0.03],
        waits_s=[0.1, 0.3],
        held_s=[0.0, 0.2],
        admissions={"policy": 3},
        decision_s=0.005 * took_s,
        took_s=took_s,
        busy_s=took_s / 2,
    )


def test_figures_are_medians_of_rounds() -> None:
    figures = figures_of([run(10, 100, 1.0), run(10, 100, 2.0), run(10, 100, 4.0)])
    assert figures["throughput_tok_s"] == 500.0
    assert figures["throughput_rounds"] == [1000.0, 500.0, 250.0]
    assert figures["tbt_p50_ms"] == 20.0
    assert figures["wait_p99_ms"] == pytest.approx(298.0)
    assert figures["mean_batch"] == 10.0
    assert figures["scheduler_cpu_share"] == 0.01
    assert figures["admissions"] == {"policy": 9}
    told = table({feather.FCFS: [run(10, 100, 2.0)], "greedy": [run(10, 100, 1.0)]})
    assert [each["speedup_vs_fcfs"] for each in told.values()] == [1.0, 2.0]
    assert figures_of([Run(took_s=1.0)])["throughput_tok_s"] == 0.0


def test_bins_over_time() -> None:
    told = binned([(0.1, 4), (0.2, 6), (0.6, 8), (9.0, 2)], seconds=1.0)
    assert told == {
        "at_s": [0.25, 0.5, 0.75, 1.0], "batch": [5.0, 0.0, 8.0, 2.0], "throughput_tok_s": [40.0, 0.0, 32.0, 8.0],
    }  # fmt: skip


def test_wrong_tokens_end_the_benchmark() -> None:
    reference = Run(tokens={0: [1, 2, 3], 1: [4]})
    require_identical("greedy", Run(tokens={0: [1, 2], 1: [4, 5], 2: [7]}), reference)
    with pytest.raises(UnavailableError, match="request 0 of greedy"):
        require_identical("greedy", Run(tokens={0: [1, 9]}), reference)


@pytest.fixture
def loaded() -> LoadedConfig:
    return load(profile="cpu-local")


def options(**changed: object) -> Options:
    given = {"workload": FeatherWorkload(), "places": 16, "rounds": 1, "policies": POLICIES, "sweep": (), "plot": None}
    return Options(**(given | changed))  # type: ignore[arg-type]


def test_what_is_refused_before_an_engine_starts(loaded: LoadedConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be of greedy, heuristic, bandit, q_learning, got best"):
        checked(options(policies=["best"]), loaded)
    with pytest.raises(ConfigError, match="must be of groups, shared, decode, rate, levels, got all"):
        checked(options(sweep=["all"]), loaded)
    with pytest.raises(ConfigError, match="must be 1 to 3, got 4"):
        checked(options(workload=FeatherWorkload(levels=4)), loaded)
    with pytest.raises(InvalidInputError, match="the model takes 4096"):
        checked(options(workload=FeatherWorkload(shared_tokens=4096)), loaded)
    with pytest.raises(ConfigError):
        checked(options(plot=tmp_path / "picture.txt"), loaded)


def test_every_sweep_fits_the_built_in_model(loaded: LoadedConfig) -> None:
    points = checked(options(sweep=list(SWEEPS)), loaded)
    assert len(points) == sum(len(each) for each in SWEEPS.values())
    assert points["2 levels"].levels == 2
