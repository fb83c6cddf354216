"""How many workers are prefill-heavy: by what prompts and decodes ask for, in a slow loop."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.placement.roles import Decodes, Roles, fill, wanted

# A step takes 5 ms whatever it decodes, and may take 15.
LITTLE = Decodes(step_s=0.005, added_s=0.01, bound_s=0.015)
MUCH = Decodes(step_s=0.005, added_s=0.06, bound_s=0.015)


def follow(roles: Roles, prompts: float, decodes: Decodes, seconds: float, workers: int = 8, part: float = 1.0) -> None:
    """Ten prompts a second, which take `prompts` seconds of engine time a second. Time goes on where it was."""
    begin_s = getattr(roles, "now_s", 0.0)
    for number in range(round(seconds * 10)):
        now_s = begin_s + number / 10
        roles.prompt(prompts / 10, now_s)
        if roles.is_due(now_s):
            roles.look(workers, decodes, part, now_s)


class ClockedRoles(Roles):
    """Remembers what time it is."""

    now_s = 0.0

    def prompt(self, own_s: float, now_s: float) -> None:
        self.now_s = now_s
        super().prompt(own_s, now_s)


def test_prompts_and_decodes_fill_their_workers_alike() -> None:
    heavy = wanted(8, 4.0, LITTLE)
    assert heavy == 6
    assert fill(heavy, 8, 4.0, LITTLE) == pytest.approx(4 / 6)
    assert wanted(8, 0.9, MUCH) == 1


def test_nobody_prefills_alone_without_prompts_or_among_few_workers() -> None:
    assert wanted(8, 0.1, LITTLE) == 0
    assert [wanted(workers, 5.0, LITTLE) for workers in (1, 2, 3)] == [0, 0, 0]


def test_roles_follow_what_is_asked_for_within_a_minute_and_come_back() -> None:
    roles, seen = ClockedRoles(), []
    for prompts, decodes in ((4.0, LITTLE), (0.6, MUCH), (4.0, LITTLE)):
        follow(roles, prompts, decodes, 60)
        seen.append(roles.heavy(8))
    assert seen == [6, 1, 6]
    assert roles.changes == 6 + 5 + 5


def test_noise_turns_no_worker_back_and_forth() -> None:
    roles = ClockedRoles()
    follow(roles, 4.0, LITTLE, 60)
    changes = roles.changes
    for _ in range(20):
        for prompts in (3.9, 4.15):
            follow(roles, prompts, LITTLE, 5)
    assert roles.changes == changes


def test_one_worker_changes_at_a_look_and_of_many_workers_a_sixteenth() -> None:
    for workers, most in ((8, 1), (64, 4)):
        roles = Roles()
        roles.prompt(1000.0, 0.0)
        roles.look(workers, LITTLE, 1.0, 0.0)
        assert roles.heavy(workers) == most
        assert not roles.is_due(1.9)
        assert roles.is_due(2.0)


def test_the_prompts_of_other_routers_count_by_their_requests() -> None:
    alone, one_of_two = Roles(), Roles()
    follow(alone, 4.0, LITTLE, 60)
    follow(one_of_two, 2.0, LITTLE, 60, part=0.5)
    assert one_of_two.heavy(8) == alone.heavy(8)


def test_a_share_that_is_set_stays() -> None:
    roles = Roles(0.25)
    assert not roles.is_due(1e9)
    assert [roles.heavy(workers) for workers in (3, 4, 8)] == [0, 1, 2]


def test_workers_that_leave_take_roles_along() -> None:
    roles = Roles()
    follow(roles, 6.0, LITTLE, 60)
    assert roles.heavy(8) == 6
    assert roles.heavy(4) == 3
    assert roles.heavy(3) == 0


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
    assert 0 <= heavy < workers
    assert fill(heavy, workers, prompts, decodes) == min(
        fill(other, workers, prompts, decodes) for other in range(workers)
    )
