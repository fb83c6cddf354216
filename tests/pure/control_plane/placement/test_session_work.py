"""What a session that is open counts for: what those before it have taken."""

import numpy as np
import pytest

from control_plane.placement.session_work import SessionWork


def test_before_any_has_become_whole_a_session_counts_for_something() -> None:
    work = SessionWork()
    work.became_whole(np.zeros(0))
    assert 0 < work.mean_s < 1


def test_it_counts_for_what_the_last_ones_have_taken() -> None:
    work = SessionWork()
    work.became_whole(np.array([2.0]))
    assert work.mean_s == 2.0
    for _ in range(100):
        work.became_whole(np.array([6.0]))
    assert work.mean_s == pytest.approx(6.0, rel=0.01)
    work.became_whole(np.array([60.0]))
    assert work.mean_s < 10.0


def test_who_says_that_it_is_slow_is_not_the_measure() -> None:
    work = SessionWork()
    work.became_whole(np.array([200.0, 1.0]))
    assert work.mean_s == 1.0
