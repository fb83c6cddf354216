"""Who is asked whether it is alive, and when: the rules of `control_plane.fleet.vitality`, second by second."""

import itertools

import pytest
from rachis.v1 import worker_pb2 as wire

from cluster_core.ids import WorkerId
from control_plane.fleet.vitality import VITALITY_TIMING, Vitality
from control_plane.model.worker_snapshot import WorkerSnapshot

W0, W1 = (WorkerSnapshot(WorkerId(f"decode-{number}"), 1, wire.POOL_DECODE, f"address-{number}") for number in range(2))
DOUBTFUL_S = VITALITY_TIMING.doubtful_s
SILENCE_S, FIRST_S, LONGEST_S = (
    VITALITY_TIMING.silence_s, VITALITY_TIMING.first_pause_s, VITALITY_TIMING.longest_pause_s
)  # fmt: skip


@pytest.fixture
def vitality() -> Vitality:
    return Vitality()


def test_a_worker_that_nobody_waits_for_is_not_asked(vitality: Vitality) -> None:
    vitality.waits(W0, 0.0)
    vitality.waited(W0)
    assert vitality.due([], 100.0) == []


def test_a_worker_that_is_silent_is_asked_once_until_it_answers(vitality: Vitality) -> None:
    vitality.waits(W0, 0.0)
    assert vitality.due([], SILENCE_S - 0.01) == []
    assert vitality.due([], SILENCE_S) == [W0]
    assert vitality.due([], 100.0) == []
    vitality.alive(W0, 100.0)
    assert vitality.due([], 100.0 + SILENCE_S - 0.01) == []
    assert vitality.due([], 100.0 + SILENCE_S) == [W0]


def test_whatever_comes_from_the_worker_is_a_sign_of_life_to_all_that_wait_for_it(vitality: Vitality) -> None:
    vitality.waits(W0, 0.0)
    vitality.waits(W0, 0.0)
    for now_s in (0.4, 0.8, 1.2):
        vitality.heard(W0, now_s)
        assert vitality.due([], now_s + SILENCE_S - 0.01) == []
    assert vitality.due([], 1.2 + SILENCE_S) == [W0]


def test_the_wait_for_an_idle_worker_begins_with_the_call(vitality: Vitality) -> None:
    vitality.waits(W0, 0.0)
    vitality.waited(W0)
    vitality.waits(W0, 50.0)
    assert vitality.due([], 50.0 + SILENCE_S - 0.01) == []


def test_a_worker_of_which_calls_wait_and_nothing_comes_is_doubtful_though_it_answers(vitality: Vitality) -> None:
    vitality.waits(W0, 0.0)
    vitality.alive(W0, 1.0)
    assert not vitality.doubtful(DOUBTFUL_S - 0.01)
    assert vitality.doubtful(DOUBTFUL_S) == {("decode-0", 1)}
    vitality.heard(W0, 5.0)
    assert not vitality.doubtful(5.0 + DOUBTFUL_S - 0.01)
    assert vitality.doubtful(5.0 + DOUBTFUL_S) == {("decode-0", 1)}
    vitality.waited(W0)
    assert not vitality.doubtful(100.0)
    vitality.waits(W0, 100.0)
    assert not vitality.doubtful(101.0)


def test_a_session_that_waits_for_its_client_makes_nobody_doubtful(vitality: Vitality) -> None:
    vitality.waits(W0, 0.0, is_owed=False)
    assert not vitality.doubtful(100.0)
    vitality.waits(W0, 100.0)
    assert not vitality.doubtful(100.0 + DOUBTFUL_S - 0.01)
    assert vitality.doubtful(100.0 + DOUBTFUL_S) == {("decode-0", 1)}
    vitality.waited(W0)
    assert not vitality.doubtful(200.0)
    vitality.waited(W0, is_owed=False)


def asked_at(vitality: Vitality, until_s: float) -> list[float]:
    """When a worker that is suspect all the time, and never answers, is asked."""
    found: list[float] = []
    for tick in itertools.count():
        now_s = tick * 0.05
        if now_s > until_s:
            return found
        if vitality.due([W0], now_s):
            found.append(now_s)
            vitality.lost(W0, now_s)
    raise AssertionError


def test_a_suspect_worker_is_asked_after_pauses_that_double_up_to_a_bound(vitality: Vitality) -> None:
    times = asked_at(vitality, 30.0)
    pauses = [later - earlier for earlier, later in itertools.pairwise([0.0, *times])]
    assert pauses[:5] == pytest.approx([FIRST_S * 2**power for power in range(5)], abs=0.06)
    assert max(pauses) == pytest.approx(LONGEST_S, abs=0.06)


def test_who_answers_and_fails_again_is_trusted_ever_later(vitality: Vitality) -> None:
    now_s, waits = 0.0, []
    for _ in range(4):
        suspected_s = now_s
        while not vitality.due([W0], now_s):
            now_s += 0.05
        vitality.alive(W0, now_s)
        waits.append(now_s - suspected_s)
        # It is trusted, and a call to it fails at once.
        assert vitality.due([], now_s) == []
        now_s += 0.05
    assert waits == pytest.approx([FIRST_S, 2 * FIRST_S, 4 * FIRST_S, 8 * FIRST_S], abs=0.06)


def test_after_a_while_of_being_well_it_is_trusted_as_soon_as_ever(vitality: Vitality) -> None:
    asked_at(vitality, 10.0)
    vitality.due([W0], 20.0)
    vitality.alive(W0, 20.0)
    assert vitality.due([], 20.0) == []
    later_s = 20.0 + VITALITY_TIMING.forgive_after_s
    assert vitality.due([W0], later_s) == []
    assert vitality.due([W0], later_s + FIRST_S) == [W0]


def test_a_worker_that_turns_suspect_while_it_is_silent_is_not_asked_twice_at_once(vitality: Vitality) -> None:
    vitality.waits(W0, 0.0)
    assert vitality.due([], 1.0) == [W0]
    assert vitality.due([W0], 1.0 + LONGEST_S) == []
    assert vitality.lost(W0, 2.0 + LONGEST_S) is False, "it was suspect already"


def test_lost_says_whether_that_is_news(vitality: Vitality) -> None:
    vitality.waits(W0, 0.0)
    vitality.due([], 1.0)
    assert vitality.lost(W0, 1.5) is True
    vitality.due([W0], 1.5 + LONGEST_S)
    assert vitality.lost(W0, 6.0) is False


def test_workers_are_told_apart_and_forgotten(vitality: Vitality) -> None:
    vitality.waits(W0, 0.0)
    vitality.waits(W1, 0.4)
    assert vitality.due([], SILENCE_S) == [W0]
    vitality.alive(W0, 0.6)
    for worker in (W0, W1):
        vitality.waited(worker)
    vitality.due([], 1000.0)
    assert len(vitality) == 0


def test_an_asker_that_was_late_itself_knows_nothing_and_asks_again(vitality: Vitality) -> None:
    vitality.waits(W0, 0.0)
    assert vitality.due([], 1.0) == [W0]
    vitality.undecided(W0, 5.0)
    assert vitality.due([], 5.0 + SILENCE_S - 0.01) == []
    assert vitality.due([], 5.0 + SILENCE_S) == [W0]
    assert vitality.lost(W0, 6.0) is True, "it was not suspect before"


def test_a_suspect_whose_answer_is_not_known_is_asked_after_the_same_pause(vitality: Vitality) -> None:
    vitality.due([W0], 0.0)
    assert vitality.due([W0], FIRST_S) == [W0]
    vitality.undecided(W0, 1.0)
    assert vitality.due([W0], 1.0 + FIRST_S - 0.01) == []
    assert vitality.due([W0], 1.0 + FIRST_S) == [W0]


def test_one_that_has_left_the_registry_is_asked_as_rarely_as_a_suspect(vitality: Vitality) -> None:
    vitality.waits(W0, 0.0)
    asked = []
    for tick in range(200):
        now_s = tick * 0.1
        if vitality.due([], now_s):
            asked.append(now_s)
            assert vitality.lost(W0, now_s) is (len(asked) == 1), "it is told of once"
    assert len(asked) < 12
