"""What other routers have on the workers: summed up, shrinking, forgotten; and what placement makes of it."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
from rachis.v1 import worker_pb2 as wire

from cluster_core.ids import WorkerId
from control_plane.fleet.loads import Work
from control_plane.fleet.membership import Membership
from control_plane.fleet.other_routers import OtherRouters, Share
from control_plane.model.worker_snapshot import WorkerSnapshot

PREFILL = wire.POOL_PREFILL
WORKERS = [WorkerSnapshot(WorkerId(f"prefill-{number}"), 1, PREFILL, f"host:{number}") for number in range(2)]


def told(number: int, *, worker: str = "prefill-0", generation: int = 1, queue_s: float = 3.0) -> wire.RouterLoads:
    share = wire.WorkerShare(
        worker_id=worker, generation=generation, requests=2, tokens=50, uncomputed_tokens=40, queue_s=queue_s
    )
    return wire.RouterLoads(number=number, workers=[share])


@pytest.fixture
def others() -> OtherRouters:
    return OtherRouters(silent_s=2.0)


def test_without_others_there_is_nothing_to_add(others: OtherRouters) -> None:
    assert others.of(WORKERS, 0.0) is None


def test_what_several_routers_have_on_a_worker_adds_up(others: OtherRouters) -> None:
    others.heard("a", told(1), 0.0)
    others.heard("b", told(1), 0.0)
    others.heard("c", told(1, worker="prefill-1"), 0.0)

    sums = others.of(WORKERS, 0.0)

    assert sums is not None
    assert sums[[Share.REQUESTS, Share.TOKENS, Share.UNCOMPUTED, Share.QUEUE_S]].tolist() == [
        [4, 2],
        [100, 50],
        [80, 40],
        [6.0, 3.0],
    ]


def test_what_their_prompts_take_adds_up_and_fades_when_they_are_gone(others: OtherRouters) -> None:
    for name, rate in (("a", 1.5), ("b", 0.5), ("c", math.nan), ("d", -1.0)):
        others.heard(name, wire.RouterLoads(number=1, prefill_rate=rate), 0.0)
    assert others.prefill_rate(0.0) == 2.0
    others.forget_silent(["b", "c", "d"], 0.0)
    assert others.prefill_rate(0.0) == 2.0
    assert others.prefill_rate(20.0) == pytest.approx(0.5 + 1.5 / math.e)
    others.heard("a", wire.RouterLoads(number=2, prefill_rate=1.0, prefill_heavy=3), 20.0)
    assert (others.prefill_rate(20.0), others.prefill_heavy) == (1.5, 3)
    others.forget_silent([], 20.0)
    assert (others.prefill_rate(300.0), others.prefill_heavy) == (0.0, 0)


def test_queues_shrink_and_counts_stay_until_they_are_told_anew(others: OtherRouters) -> None:
    others.heard("a", told(1), 0.0)
    later = others.of(WORKERS, 1.0)
    much_later = others.of(WORKERS, 10.0)
    assert later is not None and much_later is not None
    assert (later[Share.QUEUE_S, 0], much_later[Share.QUEUE_S, 0]) == (2.0, 0.0)
    assert much_later[Share.REQUESTS, 0] == 2

    others.heard("a", told(2, queue_s=0.5), 10.0)
    anew = others.of(WORKERS, 10.0)
    assert anew is not None and anew[Share.QUEUE_S, 0] == 0.5


def test_another_start_of_a_worker_has_nothing_of_it(others: OtherRouters) -> None:
    others.heard("a", told(1, generation=2), 0.0)
    sums = others.of(WORKERS, 0.0)
    assert sums is not None and not sums.any()


def test_a_router_that_says_nothing_new_is_forgotten(others: OtherRouters) -> None:
    others.heard("a", told(1), 0.0)
    others.heard("b", told(1), 0.0)
    for now_s in (1.0, 2.0):
        others.heard("a", told(round(now_s) + 1), now_s)
        others.heard("b", told(1), now_s)
    assert others.forget_silent(["a", "b"], 2.0) == []
    assert others.forget_silent(["a", "b"], 3.0) == ["b"]
    assert len(others) == 1


@pytest.mark.parametrize("every_s", [0.02, 1.5, 3.0, 60.0])
def test_a_router_that_is_a_little_late_with_its_rounds_is_not_silent(others: OtherRouters, every_s: float) -> None:
    for number in range(50):
        now_s = number * every_s
        # Its rounds take longer than these.
        others.heard("a", told(int(number / 1.3) + 1), now_s)
        assert others.forget_silent(["a"], now_s, every_s=every_s) == []
    assert others.forget_silent(["a"], now_s + max(2.0, 4 * every_s) + 1.0, every_s=every_s) == ["a"]


class Counted(list[WorkerSnapshot]):
    """Counts how often it is gone through."""

    times = 0

    def __iter__(self) -> Iterator[WorkerSnapshot]:
        self.times += 1
        return super().__iter__()


def test_sums_of_pools_that_are_asked_for_in_turn_are_made_once_until_somebody_speaks(others: OtherRouters) -> None:
    prefill, decode = Counted(WORKERS), Counted(WORKERS[:1])
    for number in range(1, 3):
        others.heard("a", told(number), 0.0)
        for _ in range(100):
            seen = [others.of(pool, 0.0) for pool in (prefill, decode)]
            assert [each[Share.QUEUE_S].tolist() for each in seen if each is not None] == [[3.0, 0.0], [3.0]]
        assert (prefill.times, decode.times) == (number, number)


def test_a_router_that_took_its_word_back_is_forgotten_at_once(others: OtherRouters) -> None:
    others.heard("a", told(1), 0.0)
    assert others.forget_silent([], 0.1) == []
    assert len(others) == 0


def members(count: int = 2) -> Membership:
    membership = Membership()
    membership.replace(
        [
            wire.WorkerRegistration(
                worker_id=worker.worker_id, generation=1, pool=PREFILL, state=wire.WORKER_STATE_READY, address="host:1"
            )
            for worker in WORKERS[:count]
        ]
    )
    for member in membership.members():
        member.version_skew = ""
    return membership


def test_placement_sees_what_all_routers_have_and_tells_its_own_alone() -> None:
    one, other = members(), members()
    worker = one.usable(PREFILL)[0]
    one.acquire(worker, Work(50, 40, 3.0), 0.0)
    other.others.heard("one", wire.RouterLoads(number=1, workers=one.shares(0.0)), 0.0)

    seen = other.candidates(PREFILL, 0.0)

    np.testing.assert_allclose(seen.in_flight_requests, [1, 0])
    np.testing.assert_allclose(seen.in_flight_tokens, [50, 0])
    np.testing.assert_allclose(seen.uncomputed_tokens, [40, 0])
    np.testing.assert_allclose(seen.queue_s, [3.0, 0.0])
    assert other.shares(0.0) == []
    assert [(share.worker_id, share.requests, share.queue_s) for share in one.shares(1.0)] == [("prefill-0", 1, 2.0)]


def test_sessions_that_others_have_open_count() -> None:
    one, other = members(), members()
    session = Work(50, 40, 3.0, arriving=True)
    opened = one.acquire(one.usable(PREFILL)[1], session, 0.0)
    one.acquire(one.usable(PREFILL)[1], Work(50, 40, 3.0), 0.0)
    other.acquire(other.usable(PREFILL)[0], session, 0.0)
    tells(one, other, 0.0)
    np.testing.assert_allclose(other.candidates(PREFILL, 0.0).arriving, [1, 1])
    one.release(opened, session, 1.0)
    tells(one, other, 1.0)
    np.testing.assert_allclose(other.candidates(PREFILL, 1.0).arriving, [1, 0])


def test_what_others_have_makes_no_worker_late() -> None:
    """Its own prefills progress by its own count."""
    one, other = members(), members()
    one.acquire(one.usable(PREFILL)[0], Work(50, 40, 3.0), 100.0)
    other.others.heard("one", wire.RouterLoads(number=1, workers=one.shares(100.0)), 100.0)

    assert other.candidates(PREFILL, 100.0).queue_s[0] == pytest.approx(3.0)
    assert other.candidates(PREFILL, 104.0).queue_s[0] == 0.0


def waits(membership: Membership, now_s: float, *, best_effort: bool) -> float:
    """At the first worker, whose whole time is for prefills."""
    return float(membership.candidates(PREFILL, now_s).queue_at_pace_s(np.ones(2), best_effort=best_effort)[0])


def tells(one: Membership, other: Membership, now_s: float) -> None:
    number = len(other.others) + round(now_s * 10) + 1
    other.others.heard("one", wire.RouterLoads(number=number, workers=one.shares(now_s)), now_s)


def test_others_do_not_wait_for_what_routers_have_of_best_effort() -> None:
    one, other = members(), members()
    worker = one.usable(PREFILL)[0]
    one.acquire(worker, Work(50, 40, 3.0, best_effort=True), 0.0)
    interactive = one.acquire(worker, Work(60, 20, 2.0), 0.0)
    other.acquire(other.usable(PREFILL)[0], Work(70, 30, 1.0, best_effort=True), 0.0)
    tells(one, other, 0.0)

    seen = other.candidates(PREFILL, 0.0)

    assert seen.before(best_effort=True) is seen
    assert (waits(other, 0.0, best_effort=True), waits(other, 0.0, best_effort=False)) == (6.0, 2.0)
    before = seen.before(best_effort=False)
    np.testing.assert_allclose(before.in_flight_requests, [1, 0])
    np.testing.assert_allclose(before.in_flight_tokens, [60, 0])
    np.testing.assert_allclose(seen.decoding, [0, 0], err_msg="what waits does not decode")
    np.testing.assert_allclose(seen.coming, [3, 0], err_msg="and will")

    one.prefilled(interactive, Work(60, 20, 2.0), 1.0)
    (share,) = one.shares(1.0)
    assert (share.overtaken_requests, share.overtaken_tokens, share.ahead_s) == (1, 50, 0.0)


def test_what_an_engine_has_done_of_best_effort_is_not_done_of_others() -> None:
    """Nor where another router tells of it."""
    one, other = members(), members()
    worker = one.usable(PREFILL)[0]
    one.acquire(worker, Work(50, 40, 10.0, best_effort=True), 0.0)
    one.acquire(worker, Work(60, 20, 5.0), 9.0)
    assert waits(one, 9.0, best_effort=False) == 5.0
    assert waits(one, 9.0, best_effort=True) == 6.0
    assert waits(one, 10.0, best_effort=False) == 4.0
    tells(one, other, 10.0)
    assert waits(other, 10.0, best_effort=False) == 4.0


def test_a_worker_that_hangs_on_best_effort_is_late_for_all_whatever_came_and_went() -> None:
    membership = members()
    worker = membership.usable(PREFILL)[0]
    membership.acquire(worker, Work(50, 40, 1.0, best_effort=True), 0.0)
    for number in range(200):
        work = Work(60, 20, 0.1 + number / 7)
        membership.release(membership.acquire(worker, work, 0.0), work, 0.0)
    assert waits(membership, 0.5, best_effort=False) == 0.0
    assert waits(membership, 30.0, best_effort=False) == waits(membership, 30.0, best_effort=True) > 0.0


def test_a_router_that_tells_no_classes_apart_is_waited_for(others: OtherRouters) -> None:
    others.heard("a", told(1), 0.0)
    sums = others.of(WORKERS, 0.0)
    assert sums is not None and (sums[Share.AHEAD_S, 0], sums[Share.OVERTAKEN, 0]) == (3.0, 0)


def test_what_decodes_elsewhere_is_told_with_its_answers_and_an_older_router_s_counts_as_decoding() -> None:
    one, other = members(), members()
    worker = one.usable(PREFILL)[0]
    work = Work(160, 100, 2.0, answer_tokens=60)
    one.prefilled(one.acquire(worker, work, 0.0), work, 1.0)
    one.acquire(worker, work, 1.0)
    tells(one, other, 1.0)
    seen = other.candidates(PREFILL, 1.0)
    found = [seen.decoding, seen.decoding_tokens, seen.answer_tokens, seen.coming, seen.coming_tokens]
    assert [each.tolist() for each in found] == [[1, 0], [130, 0], [120, 0], [1, 0], [130, 0]]

    alone = members()
    alone.others.heard("older", told(1), 0.0)
    before = alone.candidates(PREFILL, 0.0)
    assert (before.decoding.tolist(), before.decoding_tokens.tolist()) == ([2, 0], [50, 0])
    assert before.answer_tokens.tolist() == before.coming.tolist() == [0, 0]


def test_a_worker_is_not_late_with_what_stood_behind_others_that_are_over_now() -> None:
    """Another router had ten seconds there, and has told of less and less."""
    other = members()
    worker = other.usable(PREFILL)[0]
    for now_s in range(10):
        other.others.heard("one", told(now_s + 1, queue_s=10.0 - now_s), now_s)
        if not now_s:
            other.acquire(worker, Work(70, 30, 0.2), 0.0)
        assert waits(other, now_s, best_effort=False) <= 10.2 - now_s
    assert waits(other, 20.0, best_effort=False) == pytest.approx(20.0 - 10.0 - 0.2), "then it is"


def test_a_prefill_that_is_over_leaves_the_next_one_behind_what_others_have_by_then() -> None:
    other = members()
    worker, work = other.usable(PREFILL)[0], Work(70, 30, 0.2)
    first, _ = other.acquire(worker, work, 0.0), other.acquire(worker, work, 0.0)
    other.others.heard("one", told(1, queue_s=5.0), 1.0)
    other.prefilled(first, work, 1.0)
    other.others.heard("one", told(2, queue_s=0.0), 5.0)
    assert waits(other, 5.0, best_effort=False) == 0.0
    assert waits(other, 7.0, best_effort=False) == pytest.approx(6.0 - 0.2 - 5.0)


def test_best_effort_that_others_overtake_makes_nobody_late() -> None:
    other = members()
    other.acquire(other.usable(PREFILL)[0], Work(70, 30, 0.2, best_effort=True), 0.0)
    for now_s in range(0, 60, 2):
        other.others.heard("one", told(now_s + 1, queue_s=0.3), now_s)
        assert waits(other, now_s, best_effort=False) == pytest.approx(0.3)
    assert waits(other, 70.0, best_effort=False) > 60.0, "where nobody overtakes it the worker is late with it"
