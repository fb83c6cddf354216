"""When imitated steps end: errors do not add up, idle time is not made up for, nor is what is late."""

import pytest

from imitated_gpu.pace import Pace

STEP_S = 0.01


def test_a_first_step_takes_its_time_from_now() -> None:
    assert Pace().ends_s({"a"}, STEP_S, 5.0) == pytest.approx(5.01)


def test_what_the_engine_does_between_two_steps_is_hidden_behind_them() -> None:
    pace, now_s = Pace(), 5.0
    for _ in range(100):
        # Each sleep is 0.1 ms too long, and the engine takes 2 ms of its own.
        now_s = pace.ends_s({"a"}, STEP_S, now_s) + 0.0001 + 0.002
    assert now_s == pytest.approx(5.0 + 100 * STEP_S + 0.0021)


def test_a_step_of_others_begins_when_it_is_scheduled() -> None:
    pace = Pace()
    ended_s = pace.ends_s({"a"}, STEP_S, 5.0)
    assert pace.ends_s({"b"}, STEP_S, ended_s + 0.005) == pytest.approx(ended_s + 0.005 + STEP_S)


def test_a_step_with_one_request_of_the_step_before_goes_on() -> None:
    pace = Pace()
    ended_s = pace.ends_s({"a", "b"}, STEP_S, 5.0)
    assert pace.ends_s({"b", "c"}, STEP_S, ended_s + 0.005) == pytest.approx(ended_s + STEP_S)


def test_what_took_longer_than_a_step_is_late_and_not_made_up_for() -> None:
    pace = Pace()
    ended_s = pace.ends_s({"a"}, STEP_S, 5.0)
    late_s = ended_s + 1.0
    assert pace.ends_s({"a"}, STEP_S, late_s) == late_s
    assert pace.ends_s({"a"}, STEP_S, late_s) == pytest.approx(late_s + STEP_S)


def test_a_step_that_begins_before_the_last_one_ended_takes_its_own_time() -> None:
    """The engine was asked to go on before it had slept to the end."""
    pace = Pace()
    pace.ends_s({"a"}, 1.0, 5.0)
    assert pace.ends_s({"a"}, STEP_S, 5.5) == pytest.approx(5.51)
