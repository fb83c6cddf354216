"""What `rachis profile` measures, with injected measurements, and how it shows the result. No engine."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.cost_plot import crossover_text, save_plot, table_rows
from benchmarks.cost_profile import (
    BlockLayout,
    blocks_of,
    copy_measures,
    copy_sizes,
    measure_curve,
    prefill_measure,
    prompt_sizes,
)
from benchmarks.measuring_process import measure_in_process
from cluster_configs.preemption_costs import CostModel, LatencyCurve
from cluster_core.engine_reports import EngineInfo
from cluster_core.errors import InvalidInputError, UnavailableError
from tests.fakes.engine import FakeEngine

LAYOUT = BlockLayout((1024, 1024), blocks=100, block_size_tokens=32)


def curve(points_ms: dict[int, float]) -> LatencyCurve:
    return LatencyCurve({tokens: (each,) for tokens, each in points_ms.items()})


class FakeMeasure:
    """Takes `took_s(size)` of a clock of its own for each measurement, and calls its duration in milliseconds."""

    def __init__(self, took_s: Callable[[int], float], limit_s: float) -> None:
        self.calls: list[int] = []
        self._took_s = took_s
        self._left_s = limit_s

    def left_s(self) -> float:
        return self._left_s

    async def __call__(self, size: int) -> float:
        self.calls.append(size)
        self._left_s -= self._took_s(size)
        return self._took_s(size) * 1000


def test_sizes_are_powers_of_two_and_the_longest_prompt() -> None:
    assert prompt_sizes(4096) == [16, 32, 64, 128, 256, 512, 1024, 2048, 4095]
    assert prompt_sizes(100) == [16, 32, 64, 99]
    assert prompt_sizes(12) == [11]


def test_copies_end_with_what_host_memory_holds() -> None:
    assert copy_sizes([16, 32, 64, 128], LAYOUT, slots=2) == [16, 32, 64]
    assert copy_sizes([64, 128], LAYOUT, slots=1) == [64]


def test_host_slots_are_bounded_by_the_device_and_never_none() -> None:
    assert LAYOUT.host_slots(10 * 2048 + 1) == 10
    assert LAYOUT.host_slots(1 << 40) == 100
    assert LAYOUT.host_slots(0) == 1
    assert blocks_of(33, LAYOUT) == 2


async def test_every_size_is_measured_once_more_than_it_counts() -> None:
    measure, steps = FakeMeasure(lambda size: size / 1000, limit_s=1e9), list[int]()
    samples = await measure_curve([16, 32], 3, measure, measure.left_s, steps.append)
    assert samples == {16: [16.0] * 3, 32: [32.0] * 3}
    assert measure.calls == [16] * 4 + [32] * 4
    assert sum(steps) == 8


async def test_sizes_that_would_not_end_in_time_are_left_out_and_the_smallest_never_is() -> None:
    measure, steps = FakeMeasure(lambda size: size / 16, limit_s=90.0), list[int]()
    samples = await measure_curve([16, 32, 64, 128, 256], 1, measure, measure.left_s, steps.append)
    assert list(samples) == [16, 32, 64, 128]
    assert sum(steps) == 10
    measure = FakeMeasure(lambda size: 1.0, limit_s=0.0)
    assert list(await measure_curve([16, 32], 1, measure, measure.left_s, steps.append)) == [16]


async def test_no_two_prefills_have_the_same_prompt_or_name() -> None:
    engine = FakeEngine()
    info: EngineInfo = await engine.start(lambda phase: None, lambda why: None)
    measure = prefill_measure(engine, info, random.Random(0))
    for _ in range(4):
        assert await measure(16) >= 0
    assert len({job.token_ids for job in engine.jobs}) == len({job.request_id for job in engine.jobs}) == 4
    assert {len(job.token_ids) for job in engine.jobs} == {16}


async def test_copies_go_between_different_places_and_each_is_waited_for() -> None:
    log: list[tuple[str, list[int], list[int]]] = []
    waits: list[None] = []

    class Copies:
        def copy_out(self, blocks: list[int], slots: list[int]) -> None:
            log.append(("out", blocks, slots))

        def copy_in(self, slots: list[int], blocks: list[int]) -> None:
            log.append(("in", slots, blocks))

    out_ms, in_ms = copy_measures(LAYOUT, 10, Copies(), lambda: waits.append(None), random.Random(0))
    assert await out_ms(64) >= 0
    assert await in_ms(4096) >= 0
    assert [(kind, len(source), len(target)) for kind, source, target in log] == [("out", 2, 2), ("in", 10, 10)]
    assert all(len(set(each)) == len(each) and max(each) < 10 for _, *sides in log for each in sides)
    assert len(waits) == 4


@pytest.mark.parametrize(
    ("recompute", "one_way", "text"),
    [
        ({16: 9.0, 64: 90.0}, {16: 1.0, 64: 2.0}, "always"),
        ({16: 1.0, 64: 2.0}, {16: 1.0, 64: 2.0}, "never"),
        ({16: 9.0, 64: 9.0}, {16: 1.0, 64: 9.0}, "for some small victims only"),
        ({16: 1.0, 64: 90.0}, {16: 1.0, 64: 2.0}, "from 17 tokens on"),
    ],
)
def test_crossover_in_words(recompute: dict[int, float], one_way: dict[int, float], text: str) -> None:
    assert crossover_text(CostModel(curve(recompute), curve(one_way), curve(one_way))) == text


def test_table_has_a_row_for_each_prefill_size_and_fits_a_terminal() -> None:
    model = CostModel(curve({16: 1.0, 64: 90.0}), curve({16: 1.0}), curve({16: 0.0}))
    rows = table_rows(model)
    assert [row[:6] for row in rows] == [
        ("16", "1.000", "1.000", "0.000", "1.000", "recompute"),
        ("64", "90.000", "4.000", "0.000", "4.000", "swap"),
    ]
    assert all(len(line) <= 12 for row in rows for line in row[6].splitlines())


def test_plot_is_a_png(tmp_path: Path) -> None:
    model = CostModel(LatencyCurve({16: (1.0, 2.0), 64: (90.0,)}), curve({16: 1.0, 64: 2.0}), curve({16: 1.0}))
    save_plot(model, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


class SilentReports:
    def __init__(self) -> None:
        self.seen: list[object] = []

    def phase(self, text: str) -> None:
        self.seen.append(text)

    def total(self, steps: int) -> None:
        self.seen.append(steps)

    def done(self, steps: int = 1) -> None:
        self.seen.append(-steps)


async def test_process_tells_its_progress_and_result() -> None:
    reports = SilentReports()
    arguments = {"do": "succeed", "value": 7}
    assert await measure_in_process("tests.process.benchmarks.measurement_process", arguments, reports) == {"value": 7}
    assert reports.seen == ["working", 2, -1, -1]


@pytest.mark.parametrize(
    ("do", "kind", "message"),
    [
        ("refuse", InvalidInputError, "bad input"),
        ("fail", UnavailableError, "went away"),
        ("crash", UnavailableError, "ended early: ZeroDivisionError"),
        ("vanish", UnavailableError, "ended early: no word"),
    ],
)
async def test_fault_in_the_process_is_one_sentence(do: str, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        await measure_in_process("tests.process.benchmarks.measurement_process", {"do": do}, SilentReports())
