"""The grid of objectives: what a set-up carries, at which rates it is run, and what is compared with what."""

import pickle
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import system_grid
from benchmarks.system_grid import DEFLECTION, EFFORTS, HYBRID, TAICHI, GridStudy, around, capacity, measure
from cluster_core.errors import ConfigError
from cluster_sim.reports.figures import Histogram
from command_line.bench.system_grid_run import Options, study_of

RATES = (1.0, 2.0, 3.0, 4.0)


@pytest.mark.parametrize(
    ("shares", "carried"),
    [
        ([1.0, 1.0, 0.8, 0.1], 2.5),
        ([1.0, 0.9, 0.0, 0.0], 2.0),
        ([1.0, 1.0, 1.0, 0.95], 4.0),
        ([0.89, 0.5, 0.0, 0.0], 0.0),
        ([0.8, 0.95, 0.85, 0.0], 2.5),
    ],
)
def test_a_set_up_carries_up_to_where_too_few_requests_keep_the_objectives(shares: list[float], carried: float) -> None:
    assert capacity(RATES, shares) == pytest.approx(carried)


@pytest.mark.parametrize(
    ("start", "carries", "asked"),
    [
        (2.0, 3.5, [3.0, 4.0]),
        (2.2, 1.5, [1.0, 2.0, 3.0]),
        (0.0, 9.0, [1.0, 2.0, 3.0, 4.0]),
        (0.0, 0.5, [1.0]),
        (4.0, 3.0, [3.0, 4.0]),
    ],
)
def test_the_hybrid_is_run_from_what_the_best_other_carries_to_the_rates_on_both_sides_of_what_it_does(
    start: float, carries: float, asked: list[float]
) -> None:
    found = around(RATES, start, lambda rate: 1.0 if rate <= carries else 0.0)
    assert list(found) == asked


def kept(carries: Mapping[str, float]) -> Any:
    """Runs in which everybody keeps the objectives up to a rate by set-up, and nobody beyond."""

    def simulated(study: GridStudy, name: str, size: int, rate: float, seed: int, objectives: Any = None) -> Any:
        attained = 100 if rate <= carries.get(name, 0.0) else 0
        tpot_s = Histogram()
        tpot_s.add(0.03)
        return SimpleNamespace(
            attained_of=[attained] * len(study.cells), measured=100, attainment=attained / 100, tpot_s=tpot_s,
            outcomes={"refused": 5}, requests=100,
        )  # fmt: skip

    return simulated


def study(kind: str, file: Path | None = None, **changes: Any) -> GridStudy:
    return GridStudy(kind, file, **{**EFFORTS["quick"], **changes})


STUDY = study("trace", Path("mooncake_x.jsonl"), rates=RATES, ttft_s=(1.0, 2.0), tpot_ms=(25.0,))


def test_each_cell_is_compared_with_the_best_other_and_the_worst_cell_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        system_grid, "simulate", kept({"pools_50": 2.0, "shared": 1.0, HYBRID: 3.0})
    )  # Seconds of simulation.
    steps: list[str] = []
    result = measure(STUDY, steps.append)
    assert len(steps) == STUDY.steps
    first, second = result["cells"]
    assert (first["best_other"], first["core"], second["core"]) == ("pools_50", False, True)
    # Carried up to 2.1 and 3.1: at the next rate nobody keeps them.
    assert first["ratio"] == result["worst_ratio"] == result["core_ratio"] == pytest.approx(3.1 / 2.1, abs=1e-3)
    assert (result["lost_cells"], first["tpot_p99_over_objective"]) == (0, pytest.approx(1.2, rel=0.01))
    monkeypatch.setattr(system_grid, "simulate", kept({"pools_50": 1.0, DEFLECTION: 3.0, HYBRID: 2.0}))  # Likewise.
    deflected = measure(STUDY, lambda text: None)
    assert ({cell["best_other"] for cell in deflected["cells"]}, deflected["lost_cells"]) == ({DEFLECTION}, 2)


def test_a_capacity_that_only_a_short_run_has_is_seen_in_one_twice_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where sessions grow: by hotness the queue grows with them, which takes longer than a run to be felt."""
    for_a_while, for_longer = kept({"shared": 3.0, HYBRID: 2.0}), kept({"shared": 1.0, HYBRID: 3.0})

    def simulated(of: GridStudy, *given: Any) -> Any:
        return (for_a_while if of.seconds == STUDY.seconds else for_longer)(of, *given)

    monkeypatch.setattr(system_grid, "simulate", simulated)  # Likewise.
    for cell in measure(STUDY, lambda text: None)["cells"]:
        assert (cell["best_other"], cell["ratio"]) == ("shared", pytest.approx(2.1 / 3.1, abs=1e-3))
        assert cell["lasting"] == {"other": 0.0, HYBRID: 1.0}


def test_a_sweep_goes_on_where_the_objectives_are_kept_at_its_last_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, float]] = []
    carries = kept({"shared": 6.0, HYBRID: 12.0})

    def noted(*given: Any, **named: Any) -> Any:
        asked.append((given[1], given[3]))
        return carries(*given, **named)

    monkeypatch.setattr(system_grid, "simulate", noted)  # Seconds of simulation.
    onward = replace(STUDY, goes_on=True)
    # 5.6 is kept and 7.84 is not; the hybrid keeps 10.976 and not 15.366, a tenth of the way there.
    (first, _) = measure(onward, lambda text: None)["cells"]
    assert first["capacity"]["shared"] == pytest.approx(5.6 + 0.1 * 2.24, abs=1e-3)
    assert first["capacity"][HYBRID] == pytest.approx(10.976 + 0.1 * 4.39, abs=1e-3)
    assert max(rate for name, rate in asked if name == "shared") == 7.84
    assert measure(STUDY, lambda text: None)["cells"][0]["capacity"] == {
        "pools_25": 0, "pools_50": 0, "pools_62.5": 0, "shared": 4.0, "lmetric": 0, DEFLECTION: 0, TAICHI: 0,
        HYBRID: 4.0,
    }  # fmt: skip


def test_a_cell_that_nobody_else_carries_has_no_ratio_and_one_that_the_hybrid_does_not_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(system_grid, "simulate", kept({HYBRID: 1.0}))  # Likewise.
    alone = measure(STUDY, lambda text: None)["cells"]
    assert {cell["ratio"] for cell in alone} == {cell["lasting"]["other"] for cell in alone} == {None}
    monkeypatch.setattr(system_grid, "simulate", kept({"shared": 1.0}))  # Likewise.
    lost = measure(STUDY, lambda text: None)
    assert (lost["worst_ratio"], lost["lost_cells"]) == (0.0, 2)


def given(**changes: Any) -> Options:
    usual = {
        "effort": "usual", "trace": None, "kind": "decode_heavy", "cost_model": "h100-llama-3.1-8b", "sizes": None,
        "rates": None, "seconds": None, "seeds": None, "ttft_s": "0.5,2", "tpot_ms": "25",
    }  # fmt: skip
    return Options(**{**usual, **changes})


def test_options_make_a_study() -> None:
    asked = study_of(given(rates="2,1", sizes="4,6", seeds="0,7", seconds=100.0))
    assert (asked.sizes, asked.rates, asked.seeds, asked.seconds) == ((4, 6), (1.0, 2.0), (0, 7), 100.0)
    assert asked.cells == [(0.5, 25), (2, 25)]
    for effort, those in EFFORTS.items():
        left = study_of(given(effort=effort))
        assert {name: getattr(left, name) for name in those} == those
        assert study_of(given(effort=effort, seeds="5")).seeds == (5,), "what is given goes before the effort"
    assert study_of(given(trace=Path("x.jsonl"))).kind == "trace"
    with pytest.raises(ConfigError, match="--grid-ttft-s: must be"):
        study_of(given(ttft_s="0"))


def test_runs_in_any_order_are_the_same_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """As processes do them: from the last to the first, each handed over as bytes."""

    def backwards(function: Any, each: Any) -> Any:
        packed = [pickle.dumps((function, one)) for one in each]
        done = [call(one) for call, one in map(pickle.loads, reversed(packed))]
        return reversed(done)

    monkeypatch.setattr(system_grid, "simulate", kept({"pools_50": 2.0, "lmetric": 3.0, HYBRID: 3.0}))  # Likewise.
    assert measure(STUDY, lambda text: None, backwards) == measure(STUDY, lambda text: None)
