"""What loads from host memory cost the steps beside them, in simulated time."""

import pytest

from benchmarks.loads_beside_steps import Figures, Scene, run

SCENE = Scene(answers=8, prefix_tokens=4096, prompts=6)


@pytest.fixture(scope="module")
def before() -> Figures:
    return run(SCENE, "before the step")


@pytest.mark.parametrize("way", ["beside steps", "as is cheaper"])
def test_beside_steps_a_load_holds_nobody_up_and_its_request_for_a_step_at_most(before: Figures, way: str) -> None:
    beside = run(SCENE, way)
    assert before.loaded_share == beside.loaded_share == 1.0
    assert beside.step_p99 < 0.6 * before.step_p99
    assert beside.ttft_p50 < before.ttft_p50 + beside.step_p99
