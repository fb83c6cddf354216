"""The grid of objectives over simulated clusters."""

import pytest

from benchmarks import system_grid
from benchmarks.system_grid import HYBRID, PUBLISHED, TAICHI
from tests.pure.benchmarks.test_system_grid import study


@pytest.mark.parametrize("name", ["pools_50", "shared", "lmetric", TAICHI, HYBRID])
def test_every_set_up_can_be_simulated(name: str) -> None:
    """A few drawn requests: all of them have an outcome."""
    few = study("decode_heavy", sizes=(4,), ttft_s=(5.0,), tpot_ms=(50.0,), seconds=10.0)
    figures = system_grid.simulate(few, name, 4, 1.0, 0)
    assert figures.requests == 40
    assert len(figures.attained_of) == (0 if name in (HYBRID, TAICHI) else 1)


def test_the_published_rules_are_not_one_another() -> None:
    """Of long prompts, which prefill-heavy workers have sooner and decode-heavy ones in time."""
    few = study("conversation", sizes=(4,), ttft_s=(10.0,), tpot_ms=(100.0,), seconds=20.0)
    runs = {name: system_grid.simulate(few, name, 4, 1.0, 0, (10.0, 100.0)) for name in (*PUBLISHED, HYBRID)}
    assert len({run.ttft_s.mean for run in runs.values()}) == len(runs)
