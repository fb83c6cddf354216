"""When a step of an engine is none any more."""

import pytest

from cluster_core.heartbeat import COMMAND_S, COPY_S, FIRST_S, LEAST_S, Heartbeat


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def heartbeat(clock: Clock) -> Heartbeat:
    return Heartbeat(clock)


def steps(heartbeat: Heartbeat, clock: Clock, *seconds: float) -> None:
    for each in seconds:
        with heartbeat.step():
            clock.now_s += each


def test_an_engine_with_nothing_to_do_does_not_hang(heartbeat: Heartbeat, clock: Clock) -> None:
    steps(heartbeat, clock, 0.01, 0.01, 0.01)
    clock.now_s += 1000.0
    assert heartbeat.stalled_s == 0.0


def test_the_first_steps_may_take_long(heartbeat: Heartbeat, clock: Clock) -> None:
    with heartbeat.step():
        clock.now_s += FIRST_S
        assert heartbeat.stalled_s == 0.0
        clock.now_s += 1.0
        assert heartbeat.stalled_s == FIRST_S + 1.0


@pytest.mark.parametrize(("usual_s", "patience_s"), [(0.01, LEAST_S), (2.0, 10.0)])
def test_later_ones_as_long_as_the_slowest_of_late_allow(
    heartbeat: Heartbeat, clock: Clock, usual_s: float, patience_s: float
) -> None:
    steps(heartbeat, clock, usual_s, usual_s / 2, usual_s)
    with heartbeat.step():
        clock.now_s += patience_s * 0.99
        assert heartbeat.stalled_s == 0.0
        clock.now_s += patience_s * 0.02
        assert heartbeat.stalled_s == pytest.approx(patience_s * 1.01)
    assert heartbeat.stalled_s == 0.0, "it has ended after all"


def test_a_slow_step_long_ago_is_forgotten(heartbeat: Heartbeat, clock: Clock) -> None:
    steps(heartbeat, clock, 4.0, *[0.01] * 5000)
    assert heartbeat.patience_s == LEAST_S


def test_a_step_that_fails_has_ended(heartbeat: Heartbeat, clock: Clock) -> None:
    with pytest.raises(ZeroDivisionError), heartbeat.step():
        raise ZeroDivisionError
    clock.now_s += 1000.0
    assert heartbeat.stalled_s == 0.0


def test_an_engine_that_steps_on_while_none_of_its_copies_ends_hangs(heartbeat: Heartbeat, clock: Clock) -> None:
    steps(heartbeat, clock, 1.0, 1.0, 1.0)
    began_s, patience_s = clock.now_s, COPY_S + heartbeat.patience_s
    while clock.now_s - began_s < patience_s:
        assert heartbeat.stalled_s == 0.0
        steps(heartbeat, clock, 1.0)
        heartbeat.copies(began_s)
    steps(heartbeat, clock, 1.0)
    heartbeat.copies(began_s)
    assert heartbeat.stalled_s == patience_s + 1.0
    heartbeat.copies(None)
    assert heartbeat.stalled_s == 0.0, "it has ended after all"


def test_a_copy_that_ends_during_a_long_step_is_noticed_after_it(heartbeat: Heartbeat, clock: Clock) -> None:
    steps(heartbeat, clock, *[6.0] * 4)
    heartbeat.copies(clock.now_s)
    with heartbeat.step():
        clock.now_s += 5 * 6.0
        assert heartbeat.stalled_s == 0.0


def test_what_passes_between_two_steps_is_not_the_copys(heartbeat: Heartbeat, clock: Clock) -> None:
    steps(heartbeat, clock, *[0.01] * 4)
    heartbeat.copies(clock.now_s)
    clock.now_s += 1000.0
    assert heartbeat.stalled_s == 0.0, "an adapter was loaded, say"


def test_a_command_that_does_not_end_hangs_after_as_long_as_a_slow_disk_may_take(
    heartbeat: Heartbeat, clock: Clock
) -> None:
    steps(heartbeat, clock, 0.01, 0.01, 0.01)
    with heartbeat.command():
        clock.now_s += COMMAND_S
        assert heartbeat.stalled_s == 0.0
        clock.now_s += 1.0
        assert heartbeat.stalled_s == COMMAND_S + 1.0
    assert heartbeat.stalled_s == 0.0, "it has ended after all"


def test_how_long_a_command_takes_says_nothing_of_steps(heartbeat: Heartbeat, clock: Clock) -> None:
    with heartbeat.command():
        clock.now_s += 20.0
    assert heartbeat.patience_s == FIRST_S, "it is no step"
    steps(heartbeat, clock, 0.01, 0.01, 0.01)
    assert heartbeat.patience_s == LEAST_S


def test_a_command_that_fails_has_ended(heartbeat: Heartbeat, clock: Clock) -> None:
    with pytest.raises(ZeroDivisionError), heartbeat.command():
        raise ZeroDivisionError
    clock.now_s += 1000.0
    assert heartbeat.stalled_s == 0.0
