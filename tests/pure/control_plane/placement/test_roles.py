"""How many workers are prefill-heavy: by what prompts and decodes ask for, in a slow loop."""

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.placement.roles import Decodes, Roles, ToldRoles, fill, most_heavy, wanted

# A step takes 5 ms whatever it decodes, and may take 15.
ALONE = ToldRoles()
LITTLE = Decodes(step_s=0.005, added_s=0.01, bound_s=0.015)
FAIR = Decodes(step_s=0.005, added_s=0.5, bound_s=0.015)


def follow(roles: Roles, prompts: float, decodes: Decodes, seconds: float, workers: int = 8, others: float = 0) -> None:
    """Ten prompts a second, which take `prompts` seconds of engine time a second. Time goes on where it was."""
    begin_s = getattr(roles, "now_s", 0.0)
    for number in range(round(seconds * 10)):
        now_s = begin_s + number / 10
        roles.prompt(prompts / 10, now_s)
        if roles.is_due(now_s):
            roles.look(workers, decodes, ToldRoles(others), now_s)


class ClockedRoles(Roles):
    """Remembers what time it is."""

    now_s = 0.0

    def prompt(self, own_s: float, now_s: float) -> None:
        self.now_s = now_s
        super().prompt(own_s, now_s)


def test_prompts_and_decodes_fill_their_workers_alike() -> None:
    # Of 64 workers 8 may be prefill-heavy.
    heavy = wanted(64, 3.5, FAIR)
    assert heavy == 4
    assert fill(heavy, 64, 3.5, FAIR) == pytest.approx((0.005 + 0.5 / 60) / 0.015)
    assert [wanted(64, prompts, FAIR) for prompts in (1.0, 40.0)] == [0, 8]


def test_an_eighth_of_the_workers_is_prefill_heavy_at_most_and_one_of_four() -> None:
    assert [most_heavy(workers) for workers in (1, 3, 4, 8, 15, 16, 64)] == [0, 0, 1, 1, 1, 2, 8]


def test_nobody_prefills_alone_without_prompts_or_among_few_workers() -> None:
    assert wanted(8, 0.1, LITTLE) == 0
    assert [wanted(workers, 5.0, LITTLE) for workers in (1, 2, 3)] == [0, 0, 0]


def test_roles_follow_what_is_asked_for_within_a_minute_and_come_back() -> None:
    roles, seen = ClockedRoles(), []
    for prompts in (8.0, 0.5, 8.0):
        follow(roles, prompts, LITTLE, 60, workers=32)
        seen.append(roles.heavy(32))
    assert seen == [4, 0, 4]
    assert roles.changes == 3 * 4


def test_noise_turns_no_worker_back_and_forth() -> None:
    roles = ClockedRoles()
    follow(roles, 3.5, FAIR, 60, workers=64)
    changes = roles.changes
    assert 0 < roles.heavy(64) < 8
    for _ in range(20):
        for prompts in (3.4, 3.65):
            follow(roles, prompts, FAIR, 5, workers=64)
    assert roles.changes == changes


def changes_in_ten_minutes(workers: int, seed: int) -> int:
    """Of prompts of half a second that are just worth one of few workers, and come as they will."""
    roles, rng = Roles(), Random(seed)
    next_s = 0.0
    for look in range(300):
        now_s = 2.0 * look
        while next_s <= now_s:
            roles.prompt(0.5, next_s)
            next_s += rng.expovariate(2 * 0.05 * workers)
        roles.look(workers, Decodes(0.005, 0.005 * workers, 0.015), ALONE, now_s)
    return roles.changes


@pytest.mark.parametrize("workers", [4, 8, 15])
def test_prompts_that_are_just_worth_one_of_few_workers_turn_it_back_and_forth_seldom(workers: int) -> None:
    """With such a worker or none there is no choice between."""
    changes = [changes_in_ten_minutes(workers, seed) for seed in range(20)]
    # With one share for both ways it was thirty; without having to last, nine in the mean of four workers.
    assert sum(changes) / 20 <= 6


@pytest.mark.parametrize(("own_s", "earlier_s"), [(0.45, 0.0), (5.0, 100.0)])
def test_one_long_prompt_is_no_reason_for_a_worker_of_its_own(own_s: float, earlier_s: float) -> None:
    """Nor is the first one."""
    roles = Roles()
    roles.prompt(1e-6, -earlier_s)
    roles.prompt(own_s, 0.0)
    for look in range(30):
        roles.look(4, LITTLE, ALONE, 2.0 * look)
    assert roles.changes == 0


def test_a_router_that_has_just_begun_takes_what_comes_for_what_will_come() -> None:
    roles = ClockedRoles()
    follow(roles, 0.5, LITTLE, 12, workers=4)
    assert roles.heavy(4) == 1 and roles.prompts(12.0) == pytest.approx(0.5, rel=0.05)


def test_what_is_not_counted_for_a_while_is_not_forgotten_meanwhile() -> None:
    roles = ClockedRoles()
    follow(roles, 0.3, LITTLE, 60, workers=4)
    before = roles.prompts(60.0)
    for now_s in range(61, 120):
        roles.pause(float(now_s))
    assert roles.prompts(119.0) == before


def test_between_the_thresholds_a_router_has_one_where_another_one_has() -> None:
    for others, expected in ((ToldRoles(0.17, 0), 0), (ToldRoles(0.17, 1), 1), (ToldRoles(0.13, 1), 0)):
        roles = Roles()
        for look in range(30):
            roles.look(4, LITTLE, others, 2.0 * look)
        assert roles.heavy(4) == expected


def test_who_is_prefill_heavy_stays_while_some_are_away() -> None:
    roles, names = Roles(), [f"w{number:02d}" for number in range(16)]
    follow(roles, 60.0, LITTLE, 60, workers=16)
    assert roles.heavy_of(names, names) == {"w00", "w01"}
    assert roles.heavy_of(names, names[1:]) == {"w01"}
    assert roles.heavy_of(names, names[:1] + names[2:]) == {"w00"}
    assert roles.heavy_of(names, names[2:]) == roles.heavy_of(names, names[:3]) == frozenset()
    assert roles.heavy_of(names, names) == {"w00", "w01"}
    assert Roles(0.5).heavy_of(names[:4], names[1:4]) == {"w01"}


def test_a_prompt_that_takes_for_ever_is_none() -> None:
    roles = Roles()
    for each in (math.inf, math.nan):
        roles.prompt(each, 0.0)
    assert roles.prompts(0.0) == 0
    roles.prompt(20.0, 1.0)
    assert roles.prompts(1.0) == pytest.approx(1 / -math.expm1(-6 / 20))


def test_a_prompt_that_takes_longer_than_any_is_soon_forgotten() -> None:
    roles = ClockedRoles()
    for _ in range(5):
        roles.prompt(1e308, 0.0)
    follow(roles, 0.01, LITTLE, 360, workers=4)
    assert (roles.prompts(360.0) < 0.1, roles.heavy(4)) == (True, 0)


def test_one_worker_changes_at_a_look_and_of_many_workers_a_sixteenth() -> None:
    for workers, most in ((16, 1), (64, 4)):
        roles = Roles()
        roles.prompt(1000.0, 0.0)
        for now_s in (0.0, 2.0, 4.0):
            roles.look(workers, LITTLE, ALONE, now_s)
            assert roles.heavy(workers) == 0, "prompts have not asked for it for long"
        roles.look(workers, LITTLE, ALONE, 6.0)
        assert roles.heavy(workers) == most
        assert not roles.is_due(7.9)
        assert roles.is_due(8.0)


def test_the_prompts_of_other_routers_count_as_ones_own() -> None:
    alone, one_of_two, idle = Roles(), Roles(), Roles()
    follow(alone, 3.5, FAIR, 60, workers=64)
    follow(one_of_two, 1.75, FAIR, 60, workers=64, others=1.75)
    follow(idle, 0.0, FAIR, 60, workers=64, others=3.5)
    assert idle.heavy(64) == one_of_two.heavy(64) == alone.heavy(64) > 1


def test_a_share_that_is_set_stays() -> None:
    roles = Roles(0.25)
    assert not roles.is_due(1e9)
    assert [roles.heavy(workers) for workers in (3, 4, 8)] == [0, 1, 2]


def test_workers_that_leave_take_roles_along() -> None:
    roles = Roles()
    follow(roles, 60.0, LITTLE, 60, workers=64)
    assert [roles.heavy(workers) for workers in (64, 16, 4, 3)] == [8, 2, 1, 0]


@given(
    workers=st.integers(4, 100),
    prompts=st.floats(0, 200),
    added_s=st.floats(0, 2),
    step_s=st.floats(1e-4, 0.05),
    bound_s=st.floats(1e-3, 0.2),
)
def test_what_is_wanted_is_never_worse_than_any_other_and_somebody_decodes(
    workers: int, prompts: float, added_s: float, step_s: float, bound_s: float
) -> None:
    decodes = Decodes(step_s, added_s, bound_s)
    heavy = wanted(workers, prompts, decodes)
    assert 0 <= heavy <= most_heavy(workers) < workers
    assert fill(heavy, workers, prompts, decodes) == min(
        fill(other, workers, prompts, decodes) for other in range(most_heavy(workers) + 1)
    )
