"""When a turn comes, and when a request is overdue."""

from collections import OrderedDict
from math import inf

from decode_worker.batch_members import Member
from decode_worker.turns import SLACK, Turns

BOUND_S = 10.0


class Queue:
    """Waiting requests, and their turns."""

    def __init__(self) -> None:
        self.waiting: OrderedDict[str, Member] = OrderedDict()
        self.turns = Turns(self.waiting, BOUND_S)
        self.arrivals = 0

    def arrive(self, name: str, now_s: float = 0.0, deadline_s: float | None = None, priority: int = 0) -> Member:
        member = self.waiting[name] = Member(name, (), priority, self.arrivals, now_s)
        self.arrivals += 1
        self.turns.arrived(member, now_s, deadline_s)
        return member

    def leave(self, name: str) -> None:
        self.turns.left(self.waiting.pop(name))


def test_a_turn_comes_when_as_many_have_left_as_arrived_before() -> None:
    queue = Queue()
    for name in "abc":
        queue.arrive(name)
    queue.leave("c")
    queue.turns.give(0, 1.0)
    assert queue.turns.held == {"a"}
    queue.leave("a")
    queue.turns.give(0, 2.0)
    assert queue.turns.held == {"b"}
    assert queue.waiting["b"].turn_s == 2.0


def test_a_place_that_stays_free_gives_the_next_one_its_turn() -> None:
    queue = Queue()
    first, second = queue.arrive("a"), queue.arrive("b")
    queue.turns.give(1, 3.0)
    assert (first.turn_s, second.turn_s) == (3.0, inf)


def test_a_request_is_overdue_nine_tenths_of_the_bound_after_its_turn() -> None:
    queue = Queue()
    member = queue.arrive("a")
    queue.turns.give(1, 1.0)
    assert queue.turns.overdue(9.9, ()) is None
    assert queue.turns.overdue(10.0, ()) is member


def test_half_of_a_deadline_is_a_due_time_that_a_later_turn_does_not_put_off() -> None:
    queue = Queue()
    member = queue.arrive("a", deadline_s=4.0)
    queue.turns.give(1, 1.0)
    assert member.due_s == 2.0
    assert queue.turns.overdue(2.0, ()) is member


def test_the_most_urgent_of_the_overdue_comes_first_and_a_planned_one_not_again() -> None:
    queue = Queue()
    later = queue.arrive("a", deadline_s=1.0, priority=1)
    urgent = queue.arrive("b", deadline_s=2.0, priority=0)
    assert queue.turns.overdue(2.0, ()) is urgent
    assert queue.turns.overdue(2.0, {"b"}) is later
    assert queue.turns.overdue(2.0, {"a", "b"}) is None
    queue.turns.put_back()
    assert queue.turns.overdue(2.0, ()) is urgent


def test_a_preempted_request_is_overdue_at_once_and_not_held() -> None:
    queue = Queue()
    member = queue.arrive("a")
    queue.leave("a")
    queue.waiting["a"] = member
    queue.turns.returned(member, 5.0)
    assert queue.turns.overdue(5.0, ()) is member
    assert not queue.turns.held


def test_a_refused_request_is_not_held_and_keeps_the_first_time_of_its_refusal() -> None:
    queue = Queue()
    member = queue.arrive("a")
    queue.turns.give(1, 1.0)
    queue.turns.refused(member, 2.0)
    queue.turns.refused(member, 3.0)
    assert (member.refused_s, queue.turns.held) == (2.0, set())


def test_due_times_of_requests_that_left_are_forgotten() -> None:
    queue = Queue()
    for number in range(1000):
        queue.arrive(str(number), deadline_s=1e6)
        queue.leave(str(number))
    assert queue.turns.due_times <= SLACK + 1
