"""A first token comes at the end of a step, with others: prompts behind it, or those who decode."""

import pytest

from control_plane.placement.by_objective import Objectives
from tests.pure.control_plane.placement.router_world import prompt
from tests.pure.control_plane.placement.test_objective_placer import busy, placed_by


@pytest.mark.parametrize(("step_tokens", "behind_s"), [(0, 0.0), (200, 0.1), (1000, 0.16)])
def test_a_first_token_waits_for_prompts_behind_it_in_its_step(step_tokens: int, behind_s: float) -> None:
    """Half as many as before it, of those that a step holds: a millisecond a token, 320 before it on either worker."""
    world, placer = placed_by(Objectives(5.0, 0.1), step_tokens=step_tokens)
    assert placer.weighed(world.job(prompt(1)))[0].ttft_s == pytest.approx(0.16), "nobody is before it"
    busy(world, placer)
    assert placer.weighed(world.job(prompt(1)))[0].ttft_s == pytest.approx(0.48 + behind_s)


@pytest.mark.parametrize("prefill_heavy", [0.0, 1.0])
def test_a_first_token_waits_for_a_step_of_those_who_decode_where_that_bounds_steps(prefill_heavy: float) -> None:
    """On prefill-heavy workers nothing does."""
    world, placer = placed_by(Objectives(5.0, 0.1), prefill_heavy, step_tokens=1000)
    for flight in busy(world, placer):
        flight.prefilled()
    step_s = 0.012
    own_s = 0.16 / (1 - step_s / 0.095)
    for choice in placer.weighed(world.job(prompt(1))):
        assert choice.ttft_s == pytest.approx(own_s + step_s)
        assert choice.prefill_s == pytest.approx(own_s)
    busy(world, placer)
    in_step_s = 0.16 if prefill_heavy else step_s
    for choice in placer.weighed(world.job(prompt(1))):
        assert choice.ttft_s == pytest.approx(3 * own_s + in_step_s)
