"""What loads from host memory cost the steps beside them, in simulated time."""

from dataclasses import replace

import pytest

from benchmarks.async_loads import Figures, Scene, run

SCENE = Scene(answers=8, prefix_tokens=4096, prompts=6)


@pytest.fixture(scope="module")
def synchronous() -> Figures:
    return run(SCENE, "synchronous")


@pytest.mark.parametrize("way", ["asynchronous", "as is cheaper"])
def test_an_asynchronous_load_holds_nobody_up_and_its_request_for_a_step_at_most(
    synchronous: Figures, way: str
) -> None:
    found = run(SCENE, way)
    assert (synchronous.loaded_share, synchronous.async_share) == (1.0, 0.0)
    assert (found.loaded_share, found.async_share) == (1.0, 1.0)
    assert found.step_p99 < 0.6 * synchronous.step_p99
    assert found.ttft_p50 < synchronous.ttft_p50 + found.step_p99


def test_the_rule_sees_each_of_the_steps_that_a_simulation_takes_at_once() -> None:
    assert run(replace(SCENE, answers=1, leaps=True), "as is cheaper").async_share == 1.0
