"""The time that hosts share, as each of them knows it by asking Redis."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster_core.clock import ClusterClock, UnixMs

TRUE_S = 1_700_000_000.0


class Host:
    """A host's two clocks. now_s: of the monotonic one, which began at another time than Redis's."""

    def __init__(self) -> None:
        self.now_s = 5.0

    def ask(self, of: ClusterClock, *, there_s: float, back_s: float, redis_ahead_s: float = 0.0) -> float:
        """Redis is asked the time: the way there and the way back take so long. By how much that sets the clock."""
        asked_s = self.now_s
        server_s = TRUE_S + asked_s + there_s + redis_ahead_s
        self.now_s += there_s + back_s
        return of.measured(server_s, asked_s, self.now_s)

    def error_s(self, of: ClusterClock) -> float:
        return abs(of.unix_s() - (TRUE_S + self.now_s))


@pytest.fixture
def host() -> Host:
    return Host()


def ten_minutes_ahead(host: Host) -> ClusterClock:
    return ClusterClock(lambda: UnixMs(round((TRUE_S + host.now_s + 600) * 1000)), lambda: host.now_s)


def test_before_redis_was_asked_it_is_the_hosts_own_time(host: Host) -> None:
    of = ten_minutes_ahead(host)
    assert host.error_s(of) == pytest.approx(600)
    assert of.host_ahead_ms() == 0
    assert of.error_s() == float("inf")


def test_one_answer_is_enough_whatever_the_hosts_clock_says(host: Host) -> None:
    of = ten_minutes_ahead(host)
    host.ask(of, there_s=0.001, back_s=0.003)
    host.now_s += 60.0

    assert host.error_s(of) == pytest.approx(0.001, abs=1e-6)
    assert of.error_s() == pytest.approx(0.002 + 60 * 2e-4, abs=1e-6)
    assert of.host_ahead_ms() == pytest.approx(600_000, abs=2)


def test_it_says_by_how_much_it_was_set(host: Host) -> None:
    of = ten_minutes_ahead(host)
    assert host.ask(of, there_s=0.001, back_s=0.001) == pytest.approx(-600.0)
    assert host.ask(of, there_s=0.001, back_s=0.1) == 0.0
    assert host.ask(of, there_s=0.001, back_s=0.001, redis_ahead_s=50.0) == pytest.approx(50.0)


def test_the_answer_with_the_shortest_way_counts_until_it_is_too_old(host: Host) -> None:
    of = ten_minutes_ahead(host)
    host.ask(of, there_s=0.0, back_s=0.002)
    host.ask(of, there_s=0.0, back_s=0.2)
    assert host.error_s(of) == pytest.approx(0.001, abs=1e-6)
    host.now_s += 600.0
    host.ask(of, there_s=0.0, back_s=0.2)
    assert host.error_s(of) == pytest.approx(0.1, abs=1e-6), "what drifted for 10 minutes is worth less"


def test_a_host_whose_clock_is_set_does_not_change_the_time(host: Host) -> None:
    own_s = [TRUE_S]
    of = ClusterClock(lambda: UnixMs(round((own_s[0] + host.now_s) * 1000)), lambda: host.now_s)
    host.ask(of, there_s=0.001, back_s=0.001)
    own_s[0] += 3600

    assert host.error_s(of) < 0.002
    assert of.host_ahead_ms() == pytest.approx(3_600_000, abs=2)


def test_a_redis_with_another_clock_is_followed_at_once(host: Host) -> None:
    of = ten_minutes_ahead(host)
    host.ask(of, there_s=0.0, back_s=0.0001)
    host.ask(of, there_s=0.5, back_s=0.5, redis_ahead_s=-40)

    assert of.unix_s() == pytest.approx(TRUE_S + host.now_s - 40, abs=0.5)


@given(ways=st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5), st.floats(0, 900)), min_size=1, max_size=30))
def test_it_is_never_wrong_by_more_than_it_says(ways: list[tuple[float, float, float]]) -> None:
    host = Host()
    of = ten_minutes_ahead(host)
    for there_s, back_s, pause_s in ways:
        host.ask(of, there_s=there_s, back_s=back_s)
        assert host.error_s(of) <= of.error_s() + 1e-6
        host.now_s += pause_s
        assert host.error_s(of) <= of.error_s() + 1e-6
