"""A first token comes at the end of a step, with others: prompts behind it, or those who decode."""

import math

import pytest

from cluster_core.errors import OverloadedError
from control_plane.placement.by_objective import Objectives
from control_plane.placement.roles import Roles
from tests.pure.control_plane.placement.router_world import DECODE, prompt
from tests.pure.control_plane.placement.test_objective_placer import busy, placed_by

# Seconds of prompts that make two workers' time all asked for, and half of it: counted as of six seconds.
ALL_OF_IT, HALF_OF_IT = 100.0, 20.0 * -math.expm1(-6.0 / 20.0)


@pytest.mark.parametrize(
    ("step_tokens", "asked_s", "behind_s"),
    [(0, ALL_OF_IT, 0.0), (200, ALL_OF_IT, 0.1), (1000, ALL_OF_IT, 0.16), (200, HALF_OF_IT, 0.05), (1000, 0.0, 0.0)],
)
def test_a_first_token_waits_for_prompts_behind_it_in_its_step(
    step_tokens: int, asked_s: float, behind_s: float
) -> None:
    """Half as many as before it, of those that a step holds, where all of the workers' time is asked for: a millisecond
    a token, 320 before it on either worker."""
    world, placer = placed_by(Objectives(5.0, 0.1), step_tokens=step_tokens)
    assert placer.weighed(world.job(prompt(1)))[0].ttft_s == pytest.approx(0.16), "nobody is before it"
    busy(world, placer)
    placer.roles = Roles(0.0)
    placer.roles.prompt(asked_s, world.now_s)
    # Or for those two to decode, a step of which takes so long.
    assert placer.weighed(world.job(prompt(1)))[0].ttft_s == pytest.approx(0.48 + max(behind_s, 0.012))


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
    placer.roles.prompt(ALL_OF_IT, world.now_s)
    in_step_s = 0.16 if prefill_heavy else step_s
    for choice in placer.weighed(world.job(prompt(1))):
        assert choice.ttft_s == pytest.approx(3 * own_s + in_step_s)


@pytest.mark.parametrize("step_tokens", [2048, 8192])
def test_of_a_burst_on_idle_workers_nearly_all_are_taken_that_are_in_time(step_tokens: int) -> None:
    """Nobody comes behind the last of them. Of prompts that take 160 ms five are computed in 0.95 s; what comes
    meanwhile, as far as it is known, would cost one of them."""
    world, placer = placed_by(Objectives(1.0, 0.1), step_tokens=step_tokens)
    taken = 0
    for number in range(20):
        job = world.job(prompt(number))
        try:
            placer.route(job, is_whole=True)
        except OverloadedError:
            continue
        placement = placer.place(job, DECODE, prefills=True)
        assert placement is not None
        placer.begin(placement)
        taken += 1
    assert 2 * 4 <= taken <= 2 * 5
