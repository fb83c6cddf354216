"""HotPrefix in the simulator: what holds at any size, and how papers and simulator are set side by side."""

import json

import pytest

from benchmarks.papers import hotprefix
from benchmarks.papers.hotprefix import BLOCK_TOKENS, ran
from benchmarks.papers.table import Cell, as_json, markdown
from benchmarks.prefix_cache.replay import RECIPES
from cluster_sim.workloads.few_shot import SHAPES, generated

_TRACE = generated(SHAPES["ceval"], requests=250, block_tokens=BLOCK_TOKENS, seed=1)


@pytest.fixture(scope="module")
def cells() -> list[Cell]:
    return hotprefix.run(lambda text: None, quick=True)


def by_name(cells: list[Cell], figure: str, cell: str) -> Cell:
    return next(each for each in cells if each.figure.startswith(figure) and each.cell == cell)


def test_every_figure_has_its_cells(cells: list[Cell]) -> None:
    figures = {each.figure.split(":")[0] for each in cells}
    assert figures == {f"Figure {number}" for number in (8, 9, 13, 14, 15)} | {"Table 1"}
    assert len({(each.figure, each.cell) for each in cells}) == len(cells)
    assert all(each.ours is not None and 0 < each.ours < 1000 for each in cells)
    assert sum(each.paper is not None for each in cells) > 25


def test_selective_admission_copies_far_less(cells: list[Cell]) -> None:
    less = by_name(cells, "Figure 13", "mmlu, less offload time").ours
    assert less is not None
    assert less > 5


def test_default_policy_finds_more_than_least_recently_used(cells: list[Cell]) -> None:
    gain = by_name(cells, "Figure 8", "mmlu, Rachis' default over lru").ours
    assert gain is not None
    assert gain > 1.1


def test_same_run_gives_the_same_figures() -> None:
    once, again = (ran(_TRACE, RECIPES["hotprefix"].settings, 8, 21_000, 21_000) for _ in range(2))
    assert once == again
    assert once.offload_s > 0


def test_more_memory_finds_more_and_takes_less_time() -> None:
    small, large = (ran(_TRACE, RECIPES["E"].settings, 4, tokens, 0) for tokens in (12_000, 120_000))
    assert small.hit_ratio < large.hit_ratio
    assert small.latency_s > large.latency_s
    assert small.offload_s == large.offload_s == 0


def test_request_larger_than_the_device_is_noticed() -> None:
    with pytest.raises(AssertionError, match="does not fit"):
        ran(_TRACE, RECIPES["E"].settings, 4, 1024, 0)


def test_ratio_is_one_inside_a_printed_range_and_over_its_nearer_end_outside() -> None:
    def ratio(ours: float | None, paper: float | tuple[float, float] | None = (2.0, 4.0)) -> float | None:
        return Cell("Figure 1", "cell", "times", paper, ours).ratio

    assert [ratio(each) for each in (3.0, 1.0, 8.0)] == [1.0, 0.5, 2.0]
    assert (ratio(3.0, 2.0), ratio(None), ratio(3.0, None)) == (1.5, None, None)


def test_table_has_a_section_for_each_figure() -> None:
    cells = [Cell("Figure 1", "a", "s", 2.0, 3.0, "noise"), Cell("Figure 2", "b", "times", (1.1, 1.2), None)]
    text = markdown("Paper", cells, "A note.")
    assert text.count("| cell | unit |") == 2
    assert "| a | s | 2 | 3 | 1.5 | noise |" in text
    assert "| b | times | 1.1 to 1.2 | - | - |  |" in text
    told = json.loads(json.dumps(as_json(cells)))
    assert told[0]["ratio"] == 1.5
    assert told[1]["paper"] == [1.1, 1.2]
