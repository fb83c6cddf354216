"""Placement by the objectives where workers come and go, clients leave, sessions are open and answers go elsewhere."""

from collections import Counter
from itertools import pairwise
from random import Random

import pytest
from rachis.v1 import worker_pb2 as wire

from cluster_core.errors import OverloadedError
from control_plane.fleet.loads import Load
from control_plane.model.job import Job
from control_plane.placement.by_objective import Objectives, Way
from control_plane.placement.explanation import explained
from control_plane.placement.flight import Flight
from control_plane.placement.objective_placer import ObjectivePlacer
from tests.pure.control_plane.placement.router_world import CHUNK, DECODE, PREFILL, RouterWorld, prompt
from tests.pure.control_plane.placement.test_objective_placer import busy, load, placed_by

BOTH = frozenset({("d0", 1), ("d1", 1)})


@pytest.mark.parametrize("emitted", [[], [7]])
def test_without_a_worker_a_request_waits_for_one_when_the_roles_are_due(emitted: list[int]) -> None:
    world, placer = placed_by(Objectives(5.0, 0.1), None)
    world.membership.replace([])
    for _ in range(2):
        job = world.job(prompt(1))
        job.emitted = list(emitted)
        assert placer.route(job, is_whole=True) is None
        assert placer.place(job, DECODE, prefills=True) is None
        assert placer.place(job, DECODE) is None
        world.now_s += 10.0


def open_session(world: RouterWorld, placer: ObjectivePlacer, number: int, chunks: int) -> str:
    job = world.job(prompt(number, chunks * CHUNK))
    job.prompt_changes = True
    placement = placer.route(job, is_whole=False)
    assert placement is not None
    placer.begin(placement)
    return placement.worker.worker_id


@pytest.mark.parametrize("apart_s", [0.0, 30.0])
def test_sessions_are_spread_over_workers(apart_s: float) -> None:
    """Opened at once, and so long apart that all that has come is computed, where it is known what they bring."""
    world, placer = placed_by(Objectives(5.0, 0.1))
    whole = world.job(prompt(99, 100 * CHUNK))
    whole.prompt_changes = True
    placer.keep(whole)
    where = Counter[str]()
    for number in range(20):
        where[open_session(world, placer, number, 2)] += 1
        world.now_s += apart_s
    assert where == {"d0": 10, "d1": 10}
    world.holds("d0", prompt(50))
    open_session(world, placer, 20, 2)
    held = placer.weighed(world.job([*prompt(50), *prompt(51, CHUNK)]))[0]
    assert held.worker.worker_id == "d0" and held.ttft_s == pytest.approx(0.016), "engines compute whole prompts first"


def test_a_session_that_is_given_up_leaves_no_seconds_behind() -> None:
    world, placer = placed_by(Objectives(5.0, 0.1))
    flights = []
    for number in range(8):
        job = world.job(prompt(number, 100 * CHUNK))
        job.prompt_changes = True
        placement = placer.route(job, is_whole=False)
        assert placement is not None
        flights.append(placer.begin(placement))
    assert world.membership.candidates(DECODE, world.now_s).queue_s.sum() == pytest.approx(8 * 1.6)
    for flight in flights:
        flight.end()
    assert world.membership.candidates(DECODE, world.now_s).queue_s.sum() == 0
    assert world.membership.candidates(DECODE, world.now_s).arriving.sum() == 0


def test_behind_a_long_prompt_that_is_given_up_nothing_is_done_yet() -> None:
    world, placer = placed_by(Objectives(60.0, 0.1))
    flights = []
    for number, chunks in enumerate((1000, 310, 310)):
        job = world.job(prompt(number, chunks * CHUNK))
        placement = placer.place(job, DECODE, frozenset({("d1", 1)}), prefills=True)
        assert placement is not None
        flights.append(placer.begin(placement))

    def queue_s() -> float:
        return float(world.membership.candidates(DECODE, world.now_s).queue_s[0])

    world.now_s += 12.0
    assert queue_s() == pytest.approx(16.0 + 2 * 4.96 - 12.0)
    flights[0].end()
    assert queue_s() == pytest.approx(2 * 4.96)
    world.now_s += 4.0
    assert queue_s() == pytest.approx(2 * 4.96 - 4.0)
    world.now_s += 16.0
    assert queue_s() == pytest.approx(20.0 - 2 * 4.96), "none of those that are left takes longer than they all"


def refused(world: RouterWorld, placer: ObjectivePlacer, number: int) -> int:
    """When it is to come back, in ms."""
    with pytest.raises(OverloadedError) as error:
        placer.route(world.job(prompt(number)), is_whole=True)
    assert error.value.retry_after_ms is not None
    return error.value.retry_after_ms


@pytest.mark.parametrize("routers", [1, 3])
def test_those_refused_at_one_moment_are_sent_away_until_each_has_a_worker(routers: int) -> None:
    """160 ms each, of two workers; other routers send theirs to the same ones."""
    world, placer = placed_by(Objectives(0.3, 0.1))
    busy(world, placer)
    for number in range(1, routers):
        world.membership.others.heard(f"router-{number}", wire.RouterLoads(number=1), world.now_s)
    told = [refused(world, placer, number) for number in range(5)]
    assert [later - sooner for sooner, later in pairwise(told)] == pytest.approx([80 * routers] * 4, abs=1)


def come_back(*, at_once: bool) -> list[int]:
    """Four that are refused at one moment, by two workers that have two prompts of 160 ms each before them; those that
    are refused again. at_once: all when the first one is to come."""
    # So much time for a step that answers leave all of it for prompts, and longer steps of prompts than of answers.
    world, placer = placed_by(Objectives(0.3, 10.0), step_tokens=100)
    computed = dict.fromkeys(("d0", "d1"), world.now_s)
    prefills: list[tuple[float, Flight]] = []

    def takes(number: int) -> None:
        placement = placer.place(world.job(prompt(number)), DECODE, prefills=True)
        assert placement is not None
        name = placement.worker.worker_id
        computed[name] = max(computed[name], world.now_s) + 0.16
        prefills.append((computed[name], placer.begin(placement)))

    for number in range(100, 104):
        takes(number)
    told_s = [world.now_s + refused(world, placer, number) / 1000 for number in range(4)]
    again = []
    for number, back_s in enumerate(told_s):
        now_s = told_s[0] if at_once else back_s
        for over in sorted((each for each in prefills if each[0] <= now_s), key=lambda each: each[0]):
            world.now_s = over[0]
            over[1].prefilled()
            prefills.remove(over)
        world.now_s = now_s
        try:
            placer.route(world.job(prompt(number)), is_whole=True)
        except OverloadedError:
            again.append(number)
        else:
            takes(number)
    return again


def test_who_comes_back_when_told_is_taken() -> None:
    assert come_back(at_once=False) == []
    assert come_back(at_once=True) == [2, 3]


def test_a_burst_waits_for_the_places_that_it_has_taken_itself() -> None:
    """Two workers with four places each, all taken at one moment: none decodes yet, and whole answers are to come."""
    world, placer = placed_by(Objectives(5.0, 0.1))
    for record in (records := [member.registration for member in world.membership.members()]):
        record.max_running_requests = 4
    world.membership.replace(records)
    busy(world, placer, prompts=7)
    assert placer.weighed(world.job(prompt(1)))[0].ttft_s == pytest.approx(4 * 0.16 + 0.013)
    busy(world, placer, prompts=1)
    # Four prefills, eight steps of four requests, its own prefill, which ends with such a step; as many again for those
    # who wait already.
    assert placer.weighed(world.job(prompt(1)))[0].ttft_s == pytest.approx(4 * 0.16 + 8 * 0.014 + 0.16 + 0.014)
    busy(world, placer, prompts=8)
    assert placer.weighed(world.job(prompt(1)))[0].ttft_s == pytest.approx(8 * 0.16 + 16 * 0.014 + 0.16 + 0.014)


def test_answers_are_planned_for_as_long_as_they_become() -> None:
    """Clients that leave 31,000 tokens open, and take 40: an almost idle worker has room."""
    world, placer = placed_by(Objectives(5.0, 0.1))
    for name in ("d0", "d1"):
        world.blocks(name, 20_000)

    def asked(number: int) -> Job:
        job = world.job(prompt(number, 63 * CHUNK))
        job.sampling.max_tokens = 31_000
        return job

    for _ in range(50):
        placer.answered(asked(1), 40)
    for number in range(100):
        job = asked(number)
        placer.route(job, is_whole=True)
        placement = placer.place(job, DECODE, prefills=True)
        assert placement is not None and placement.work.answer_tokens == 80, "with a margin"
        placer.begin(placement).prefilled()
    assert not placer.counts.refused
    said = asked(1)
    said.emitted, said.migrations = [7] * 1000, 1
    placement = placer.place(said, DECODE, prefills=True)
    assert placement is not None and placement.work.answer_tokens == 1000, "it may become twice as long"


def test_a_worker_that_says_it_is_slow_is_tried_again_before_anybody_is_refused() -> None:
    """One prompt took 200 times what it usually takes, after a start: it says so until it has measured another one."""
    world, placer = placed_by(Objectives(1.0, 0.1), costs=None)
    world.costs("d0", wire.WorkerCosts(prefill_s_per_token=0.2, decode_s=0.01))
    world.costs("d1", wire.WorkerCosts(prefill_s_per_token=1e-3, decode_s=0.01))
    sent = []
    with pytest.raises(OverloadedError):
        for number in range(20):
            job = world.job(prompt(number))
            assert placer.route(job, is_whole=True) is None
            placement = placer.place(job, DECODE, prefills=True)
            assert placement is not None
            placer.begin(placement)
            sent.append(placement.worker.worker_id)
    # Once a minute, and nobody who has something in flight.
    assert Counter(sent) == {"d0": 1, "d1": len(sent) - 1}
    assert sent[-1] == "d0"


def test_a_worker_that_is_slow_after_all_is_tried_once_a_minute() -> None:
    world, placer = placed_by(Objectives(1.0, 0.1), costs=None)
    world.costs("d0", wire.WorkerCosts(prefill_s_per_token=0.2, decode_s=0.01))
    world.costs("d1", wire.WorkerCosts(prefill_s_per_token=1e-3, decode_s=0.01))
    for number in range(6):
        placement = placer.place(world.job(prompt(number)), DECODE, frozenset({("d0", 1)}), prefills=True)
        assert placement is not None
        placer.begin(placement)
    tries = 0
    for second in range(90):
        job = world.job(prompt(100 + second))
        try:
            placer.route(job, is_whole=True)
        except OverloadedError:
            world.now_s += 1.0
            continue
        placement = placer.place(job, DECODE, prefills=True)
        assert placement is not None and placement.worker.worker_id == "d0"
        placer.begin(placement).end()
        tries += 1
        world.now_s += 1.0
    assert tries == 2


def test_what_sessions_bring_is_told_by_the_usual_worker() -> None:
    """One of two says that it takes 200 times as long: sessions still go where others are fewer by what they take."""
    world, placer = placed_by(Objectives(5.0, 0.1), costs=None)
    world.costs("d0", wire.WorkerCosts(prefill_s_per_token=1e-3, decode_s=0.01))
    world.costs("d1", wire.WorkerCosts(prefill_s_per_token=0.2, decode_s=0.01))
    whole = world.job(prompt(99, CHUNK))
    whole.prompt_changes = True
    placer.keep(whole)
    # At 16 ms each, hundreds of sessions are worth less than one chunk on the slow worker.
    assert {open_session(world, placer, number, 1) for number in range(50)} == {"d0"}


def test_what_is_late_anyway_goes_where_it_is_in_time_for_such_a_prompt() -> None:
    """The way with the fewest objectives missed is another one, and later than a prompt of this length may be."""
    rng, seen = Random(1), 0
    for number in range(300):
        world, placer = placed_by(Objectives(1.0, 0.05))
        for other in range(rng.randrange(2, 9)):
            chunks = rng.choice((20, 60, 200, 400))
            placement = placer.place(world.job(prompt(100 + other, chunks * CHUNK)), DECODE, prefills=True)
            assert placement is not None
            flight = placer.begin(placement)
            if rng.random() < 0.5:
                flight.prefilled()
        job = world.job(prompt(number, 125 * CHUNK))
        found = [each for each in placer.weighed(job) if each.way is not Way.APART]
        if found[0].ttft_s <= found[0].due_s or all(each.ttft_s > each.due_s for each in found):
            continue
        seen += 1
        placement = placer.place(job, DECODE, prefills=True)
        assert placement is not None
        taken = next(each for each in found if each.worker == placement.worker)
        assert taken.ttft_s <= taken.due_s
        if seen == 5:
            return
    raise AssertionError(f"seen {seen} times only")


def test_an_answer_that_goes_on_is_computed_with_what_was_said() -> None:
    world, placer = placed_by(Objectives(5.0, 0.1))
    job = world.job(prompt(1))
    job.sampling.max_tokens = 4000
    assert placer.place(job, DECODE, prefills=True) is not None
    job.emitted, job.migrations = list(prompt(2, 100 * CHUNK)), 1
    placement = placer.place(job, DECODE, prefills=True)
    assert placement is not None
    assert (placement.work.uncomputed_tokens, placement.work.answer_tokens) == (1760, 1600)
    assert placement.work.expected_s == pytest.approx(1.76)
    assert placement.work.tokens == 160 + 1600 + 1600
    world.holds("d1", [*prompt(1), *prompt(2, 100 * CHUNK)])
    again = placer.place(job, DECODE, prefills=True)
    assert again is not None and again.worker.worker_id == "d1"
    assert again.work.uncomputed_tokens == 1


def test_after_a_second_try_it_is_explained_where_it_went() -> None:
    world, placer = placed_by(Objectives(5.0, 0.1))
    job = world.job(prompt(1))
    assert placer.route(job, is_whole=True) is None
    for excluded, worker_id in ((frozenset[tuple[str, int]](), "d0"), (frozenset({("d0", 1)}), "d1")):
        placement = placer.place(job, DECODE, excluded, prefills=True)
        assert placement is not None and placement.worker.worker_id == worker_id
        explanation = placer.log.explanation(job.request_id)
        assert explanation is not None
        message = explained(explanation, "objectives")
        assert (message.worker_id, message.bound_worker_id) == (worker_id, "")
        placer.place(job, DECODE)


def test_an_answer_is_bound_by_who_has_its_kv_now() -> None:
    """It was prefilled elsewhere first, and again after its worker was gone."""
    world, placer = placed_by(Objectives(5.0, 0.1))
    for source in ("d0", "d1"):
        job = world.job(prompt(1))
        job.route.prefill_worker_id, job.prefilled_by, job.migrations = "d0", source, 1
        bound = placer.place(job, DECODE)
        assert bound is not None and bound.worker.worker_id == source


def test_what_is_placed_is_counted_by_policy_with_what_was_cached() -> None:
    world, placer = placed_by(Objectives(5.0, 0.1))
    world.holds("d1", prompt(1))
    assert placer.place(world.job([*prompt(1), *prompt(2, CHUNK)]), DECODE, prefills=True) is not None
    job = world.job(prompt(3))
    job.prompt_changes = True
    assert placer.route(job, is_whole=False) is not None
    assert placer.place(job, DECODE) is not None
    assert placer.counts.decisions == {(DECODE, "objectives"): 2, (PREFILL, "objectives"): 1}
    assert placer.counts.prompt_tokens == {DECODE: 176, PREFILL: 160}
    assert placer.counts.device_hit_tokens[DECODE] == 160
    assert load(world, "d0", Load.REQUESTS) == 0


def test_a_worker_that_hangs_becomes_late_though_its_requests_are_given_up_and_replaced() -> None:
    world, placer = placed_by(Objectives(600.0, 0.1))

    def begun(number: int) -> Flight:
        job = world.job(prompt(number, 63 * CHUNK))
        placement = placer.place(job, DECODE, frozenset({("d1", 1)}), prefills=True)
        assert placement is not None
        return placer.begin(placement)

    flights = [begun(number) for number in range(3)]
    for number in range(60):
        world.now_s += 0.9
        flights.pop(1).end()
        flights.append(begun(number + 10))
    assert world.membership.candidates(DECODE, world.now_s).queue_s[0] > 50.0


def test_a_late_worker_stays_late_when_the_prompt_that_it_hangs_in_is_given_up() -> None:
    world, placer = placed_by(Objectives(600.0, 0.1))
    flights = []
    for number, chunks in enumerate((1000, 62)):
        job = world.job(prompt(number, chunks * CHUNK))
        placement = placer.place(job, DECODE, frozenset({("d1", 1)}), prefills=True)
        assert placement is not None
        flights.append(placer.begin(placement))
    world.now_s += 30.0
    flights[0].end()
    assert world.membership.candidates(DECODE, world.now_s).queue_s[0] > 14.0
