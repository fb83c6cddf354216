"""Curves between measured points, the choice for a victim, and files that are good, halves, or bad."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster_configs.preemption_costs import CostModel, LatencyCurve, default_model
from cluster_core.errors import InvalidInputError
from prefill_worker.preemption import Preemption, choose, crossover_tokens

RECOMPUTE = {"16": [2.0, 1.0, 30.0], "32": [4.0]}
OUT, IN = {"16": [1.0]}, {"16": [2.0]}


def curve(points_ms: dict[int, float]) -> LatencyCurve:
    return LatencyCurve({tokens: (each,) for tokens, each in points_ms.items()})


def model(recompute: dict[int, float], one_way: dict[int, float]) -> CostModel:
    return CostModel(curve(recompute), curve(one_way), curve(one_way))


CHEAP_SWAP = model({16: 10.0}, {16: 1.0})
DEAR_SWAP = model({16: 10.0}, {16: 6.0})


def test_curve_goes_through_the_origin_and_the_medians_with_straight_lines_between() -> None:
    measured = LatencyCurve({32: (8.0,), 16: (2.0, 1.0, 30.0)})
    assert [measured.ms(tokens) for tokens in (0, 8, 16, 24, 32)] == [0.0, 1.0, 2.0, 5.0, 8.0]
    assert measured.points == {16: 2.0, 32: 8.0}


def test_curve_goes_on_with_its_last_slope() -> None:
    assert curve({16: 2.0, 32: 8.0}).ms(64) == 20.0
    assert curve({16: 2.0}).ms(64) == 8.0


def test_curve_that_falls_at_its_end_stays_flat_beyond() -> None:
    assert curve({16: 8.0, 32: 2.0}).ms(1_000_000) == 2.0


@given(
    points_ms=st.dictionaries(st.integers(1, 10_000), st.floats(0, 1e6), min_size=1, max_size=8),
    tokens=st.integers(0, 100_000),
)
def test_curve_is_never_negative_and_meets_its_points(points_ms: dict[int, float], tokens: int) -> None:
    measured = curve(points_ms)
    assert measured.ms(tokens) >= -1e-6
    assert all(measured.ms(at) == pytest.approx(each) for at, each in points_ms.items())


def test_swap_costs_out_and_in() -> None:
    assert CostModel(curve({16: 9.0}), curve({16: 1.0}), curve({16: 2.0})).swap_ms(16) == 3.0


@pytest.mark.parametrize(
    ("strategy", "costs", "expected"),
    [
        ("recompute", CHEAP_SWAP, Preemption.RECOMPUTE),
        ("swap", DEAR_SWAP, Preemption.SWAP),
        ("cost", CHEAP_SWAP, Preemption.SWAP),
        ("cost", DEAR_SWAP, Preemption.RECOMPUTE),
    ],
)
def test_strategy_decides(strategy: Any, costs: CostModel, expected: Preemption) -> None:
    assert choose(strategy, 16, 1, 8, costs) is expected


@pytest.mark.parametrize("strategy", ["swap", "cost"])
@pytest.mark.parametrize(("needed", "free"), [(5, 4), (1, 0), (0, 4)])
def test_without_room_in_host_memory_or_anything_to_copy_it_is_recomputed(
    strategy: Any, needed: int, free: int
) -> None:
    assert choose(strategy, 16, needed, free, CHEAP_SWAP) is Preemption.RECOMPUTE


def test_cost_is_that_of_the_victims_size() -> None:
    costs = model({64: 1.0, 128: 100.0}, {64: 2.0, 128: 4.0})
    assert choose("cost", 64, 4, 8, costs) is Preemption.RECOMPUTE
    assert choose("cost", 128, 8, 8, costs) is Preemption.SWAP


def test_crossover_is_the_smallest_size_from_which_on_swapping_is_cheaper() -> None:
    """Swapping is cheaper at 16 tokens too, but not at 64."""
    costs = model({16: 3.0, 64: 3.5, 128: 100.0}, {16: 1.0, 64: 2.0, 128: 4.0})
    found = crossover_tokens(costs)
    assert found is not None
    assert 64 < found <= 128
    assert [costs.swap_is_cheaper(tokens) for tokens in (16, 64, found - 1, found, 128)] == [
        True, False, False, True, True,
    ]  # fmt: skip


def test_crossover_of_one_sided_costs() -> None:
    assert crossover_tokens(CHEAP_SWAP) == 1
    assert crossover_tokens(DEAR_SWAP) is None
    assert crossover_tokens(model({16: 3.0, 64: 3.5}, {16: 1.0, 64: 2.0})) is None


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_default_models_have_rising_costs(device: Any) -> None:
    costs = default_model(device)
    sizes = [1, 16, 512, 4096, 131_072]
    for price in (costs.recompute_ms, costs.swap_ms):
        assert [price(size) for size in sizes] == sorted(price(size) for size in sizes)


def write(folder: Path, content: object) -> Path:
    path = folder / "profile.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_saved_model_loads_with_every_measurement(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    saved = CostModel(LatencyCurve({16: (2.0, 1.0)}), curve({16: 1.0}), curve({32: 3.0}), {"device": "cpu"})
    saved.save(path)
    loaded = CostModel.load(path, default_model("cpu"))
    assert (loaded.recompute.samples, loaded.swap_out.samples, loaded.swap_in.samples, loaded.metadata) == (
        {16: (2.0, 1.0)},
        {16: (1.0,)},
        {32: (3.0,)},
        {"device": "cpu"},
    )
    assert set(json.loads(path.read_text())) == {
        "recomputation_latencies",
        "swap_out_latency",
        "swap_in_latency",
        "metadata",
    }


def test_half_a_profile_takes_the_other_half_from_the_rest(tmp_path: Path) -> None:
    rest = DEAR_SWAP
    recompute_only = CostModel.load(write(tmp_path, {"recomputation_latencies": RECOMPUTE}), rest)
    assert recompute_only.recompute_ms(16) == 2.0
    assert recompute_only.swap_ms(16) == 12.0
    swap_only = CostModel.load(write(tmp_path, {"swap_in_latency": IN, "swap_out_latency": OUT, "metadata": {}}), rest)
    assert swap_only.recompute_ms(16) == 10.0
    assert swap_only.swap_ms(16) == 3.0


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ([], "object"),
        ({"metadata": {}}, "recomputation_latencies"),
        ({"swap_in_latency": IN}, "swap_out_latency"),
        ({"swap_out_latency": OUT}, "swap_in_latency"),
        ({"recomputation_latencies": []}, "recomputation_latencies"),
        ({"recomputation_latencies": {}}, "recomputation_latencies"),
        ({"recomputation_latencies": {"many": [1.0]}}, "recomputation_latencies.many"),
        ({"recomputation_latencies": {"0": [1.0]}}, "recomputation_latencies.0"),
        ({"recomputation_latencies": {"-16": [1.0]}}, "recomputation_latencies.-16"),
        ({"recomputation_latencies": {"9" * 5000: [1.0]}}, "recomputation_latencies.9"),
        ({"recomputation_latencies": {"16": []}}, "recomputation_latencies.16"),
        ({"recomputation_latencies": {"16": 1.0}}, "recomputation_latencies.16"),
        ({"recomputation_latencies": {"16": ["1"]}}, "recomputation_latencies.16"),
        ({"recomputation_latencies": {"16": [True]}}, "recomputation_latencies.16"),
        ({"recomputation_latencies": {"16": [-1.0]}}, "recomputation_latencies.16"),
        ({"recomputation_latencies": {"16": [10**400]}}, "recomputation_latencies.16"),
        ('{"recomputation_latencies": {"16": [NaN]}}', "recomputation_latencies.16"),
        ({"recomputation_latencies": RECOMPUTE, "metadata": 3}, "metadata"),
    ],
)
def test_bad_file_is_refused_naming_file_and_key(tmp_path: Path, content: object, named: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(InvalidInputError) as caught:
        CostModel.load(path, CHEAP_SWAP)
    assert str(path) in str(caught.value)
    assert named in str(caught.value)


def test_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"gone\.json: cannot be read"):
        CostModel.load(tmp_path / "gone.json", CHEAP_SWAP)
