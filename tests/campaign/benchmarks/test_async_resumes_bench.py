"""What swapped sessions that come back cost the prompts beside them, in simulated time."""

import pytest

from benchmarks.async_resumes import Figures, Scene, run

SCENE = Scene(session_tokens=16_384, every_s=0.02, rounds=2)


@pytest.fixture(scope="module")
def synchronous() -> Figures:
    return run(SCENE, "synchronous")


@pytest.mark.parametrize("way", ["asynchronous", "as is cheaper"])
def test_a_session_that_comes_back_beside_steps_holds_no_prompt_up_and_is_not_later_itself(
    synchronous: Figures, way: str
) -> None:
    found = run(SCENE, way)
    assert (synchronous.async_share, found.async_share) == (0.0, 1.0)
    assert found.short_p99 < 0.5 * synchronous.short_p99
    assert found.session_p50 < 1.1 * synchronous.session_p50
