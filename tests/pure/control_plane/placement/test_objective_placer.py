"""The shell of placement by the objectives: what it reads, what it commits, what it refuses."""

from functools import partial

import pytest
from rachis.v1 import worker_pb2 as wire

from cluster_core.errors import OverloadedError
from cluster_core.objectives import RequestClass
from control_plane.fleet.loads import Load
from control_plane.model.job import Job
from control_plane.model.prefix_scope import PrefixScope
from control_plane.placement.both_view import DecodeCosts
from control_plane.placement.by_objective import Objectives, Way
from control_plane.placement.explanation import explained
from control_plane.placement.flight import Flight
from control_plane.placement.objective_placer import BothRules, ObjectivePlacer
from control_plane.placement.placer import Placer
from tests.pure.control_plane.placement.router_world import CHUNK, DECODE, PREFILL, RouterWorld, prompt

# A millisecond a token: a prompt of 160 tokens takes 160 ms.
INTERACTIVE, BEST_EFFORT = RequestClass.INTERACTIVE, RequestClass.BEST_EFFORT
COSTS = DecodeCosts(step_s=0.01, s_per_request=0.001, s_per_token=0.0)


def placed_by(
    objectives: Objectives,
    prefill_heavy: float | None = 0.0,
    *,
    refuses: bool = True,
    costs: DecodeCosts | None = COSTS,
    best_effort_ttft_s: float | None = None,
    step_tokens: int = 0,
) -> tuple[RouterWorld, ObjectivePlacer]:
    """Over two workers that do both, by default with steps too short for two prompts."""
    rules = BothRules(objectives, costs, prefill_heavy, refuses, best_effort_ttft_s, step_tokens=step_tokens)
    world = RouterWorld(make_placer=partial(ObjectivePlacer, rules))
    world.without(PREFILL)
    assert isinstance(world.placer, ObjectivePlacer)
    return world, world.placer


def load(world: RouterWorld, worker: str, column: Load) -> float:
    member = world.membership.get(worker)
    assert member is not None
    return member.loads.value(member.row, column)


def test_a_whole_request_has_no_prefill_worker_and_counts_as_one_that_will_decode() -> None:
    world, placer = placed_by(Objectives(5.0, 0.1))
    job = world.job(prompt(1))
    assert placer.route(job, is_whole=True) is None
    placement = placer.place(job, DECODE, prefills=True)
    assert placement is not None
    flight = placer.begin(placement)
    name = placement.worker.worker_id
    assert (load(world, name, Load.COMING), load(world, name, Load.DECODING)) == (1, 0)
    # Half of the answer of 8 tokens, in the mean.
    assert load(world, name, Load.COMING_TOKENS) == 164
    flight.prefilled()
    assert (load(world, name, Load.COMING), load(world, name, Load.DECODING)) == (0, 1)
    flight.end()
    assert load(world, name, Load.DECODING_TOKENS) == 0
    world.membership.check_invariants()


def test_the_next_request_goes_round_the_queue_of_prompts() -> None:
    world, placer = placed_by(Objectives(5.0, 0.1))
    names = []
    for number in range(2):
        placement = placer.place(world.job(prompt(number)), DECODE, prefills=True)
        assert placement is not None
        placer.begin(placement)
        names.append(placement.worker.worker_id)
    assert sorted(names) == ["d0", "d1"]


def test_a_prefill_heavy_worker_prefills_and_another_one_decodes() -> None:
    """The second worker decodes so much that prompts take long there; at the first token it is still the one to decode:
    the first is to decode little."""
    world, placer = placed_by(Objectives(5.0, 0.1), prefill_heavy=0.5)
    for number in range(30):
        job = world.job(prompt(100 + number))
        bound = placer.place(job, DECODE, frozenset({("d0", 1)}))
        assert bound is not None
        placer.begin(bound)
    job = world.job(prompt(1))
    apart = placer.route(job, is_whole=True)
    assert apart is not None
    assert (apart.worker.worker_id, apart.work.decodes) == ("d0", False)
    job.prefilled_by = "d0"
    bound = placer.place(job, DECODE)
    assert bound is not None
    assert bound.worker.worker_id == "d1"
    assert placer.counts.ways == {Way.APART: 1}
    assert (placer.counts.bound, placer.counts.bound_elsewhere) == (31, 31)


def test_a_prompt_counts_once_for_the_roles_when_it_is_whole() -> None:
    world, placer = placed_by(Objectives(5.0, 0.1), None)
    session = world.job(prompt(1))
    session.prompt_changes = True
    assert placer.route(session, is_whole=False) is not None
    assert placer.roles.prompts(world.now_s) == 0
    session.prefilled_by = "d0"
    placer.keep(session)
    first = placer.roles.prompts(world.now_s)
    assert first > 0
    placer.keep(session)
    assert placer.roles.prompts(world.now_s) == first
    assert placer.place(world.job(prompt(2)), DECODE, prefills=True) is not None
    assert placer.roles.prompts(world.now_s) == pytest.approx(2 * first)


def test_roles_are_looked_at_by_decisions_and_not_by_questions() -> None:
    world, placer = placed_by(Objectives(5.0, 0.1), None)
    for number in range(8):
        world.now_s += 1.0
        placer.weighed(world.job(prompt(number)))
        assert placer.roles.is_due(world.now_s)
    placer.route(world.job(prompt(0)), is_whole=True)
    assert not placer.roles.is_due(world.now_s)


def busy(world: RouterWorld, placer: ObjectivePlacer, *, prompts: int = 4, priority: int = 0) -> list[Flight]:
    """Each worker has half of so many prompts of 160 ms before it."""
    flights: list[Flight] = []
    # None is asked twice: it would be cached.
    first = 200 + round(sum(load(world, name, Load.REQUESTS) for name in ("d0", "d1")))
    for number in range(first, first + prompts):
        placement = placer.place(asked(world, number, priority), DECODE, prefills=True)
        assert placement is not None
        flights.append(placer.begin(placement))
    return flights


def asked(world: RouterWorld, number: int, priority: int) -> Job:
    job = world.job(prompt(number))
    job.priority = priority
    return job


def test_what_no_worker_can_begin_in_time_is_refused_counted_and_told_when_to_come_back() -> None:
    world, placer = placed_by(Objectives(0.3, 0.1))
    busy(world, placer)
    with pytest.raises(OverloadedError, match=r"the first token in time, by objectives.ttft_s: 0.3 s") as refused:
        placer.route(world.job(prompt(1)), is_whole=True)
    # 480 ms and a step of the two that will decode, of 285 that are planned with.
    assert refused.value.retry_after_ms == pytest.approx(208, abs=1)
    assert placer.counts.refused == {INTERACTIVE: 1}


def test_best_effort_is_refused_by_its_own_ttft_and_others_not_for_what_they_overtake() -> None:
    world, placer = placed_by(Objectives(0.3, 0.1), best_effort_ttft_s=2.0)
    # 800 ms of best effort before each worker.
    flights = busy(world, placer, prompts=10, priority=1)
    placer.route(asked(world, 1, 1), is_whole=True)
    placer.route(asked(world, 2, 0), is_whole=True)
    assert not placer.counts.refused

    more = busy(world, placer, prompts=14, priority=1)
    with pytest.raises(OverloadedError, match=r"in time, by objectives.best_effort.ttft_s: 2 s"):
        placer.route(asked(world, 3, 1), is_whole=True)
    placer.route(asked(world, 4, 0), is_whole=True)
    assert placer.counts.refused == {BEST_EFFORT: 1}

    busy(world, placer, priority=0)
    with pytest.raises(OverloadedError, match=r"in time, by objectives.ttft_s: 0.3 s"):
        placer.route(asked(world, 5, 0), is_whole=True)
    assert placer.counts.refused == {BEST_EFFORT: 1, INTERACTIVE: 1}

    # What is prefilled decodes, and is overtaken no more.
    for flight in (*flights, *more):
        flight.prefilled()
    for name in ("d0", "d1"):
        assert load(world, name, Load.OVERTAKEN) == load(world, name, Load.OVERTAKEN_TOKENS) == 0
        assert (
            load(world, name, Load.PENDING_S) == pytest.approx(load(world, name, Load.AHEAD_S)) == pytest.approx(0.32)
        )
    world.membership.check_invariants()


def test_best_effort_without_a_ttft_of_its_own_is_refused_by_that_of_the_others() -> None:
    world, placer = placed_by(Objectives(0.3, 0.1))
    busy(world, placer, priority=1)
    with pytest.raises(OverloadedError, match=r"in time, by objectives.ttft_s: 0.3 s"):
        placer.route(asked(world, 1, 1), is_whole=True)
    assert placer.counts.refused == {BEST_EFFORT: 1}


def test_room_that_best_effort_waits_for_is_there_for_others() -> None:
    """Four decode at each worker, of five that may; a hundred of best effort wait for a place."""
    world, placer = placed_by(Objectives(0.5, 0.1), best_effort_ttft_s=3600.0)
    for record in (member.registration for member in world.membership.members()):
        record.max_running_requests = 5
        world.membership.replace([member.registration for member in world.membership.members()])
    for flight in busy(world, placer, prompts=8):
        flight.prefilled()
    busy(world, placer, prompts=100, priority=1)
    placer.route(asked(world, 1, 0), is_whole=True)
    view = placer.weighed(asked(world, 2, 0))
    assert view[0].missed == 0
    assert placer.weighed(asked(world, 3, 1))[0].ttft_s > 10 * view[0].ttft_s


@pytest.mark.parametrize("chunks", [24, 31])
def test_what_shares_its_prompt_with_what_decodes_waits_for_no_memory(chunks: int) -> None:
    """Each worker has room for 1,088 tokens and two requests of 472 or 584, of whose prompts 384 or 496 are the same.
    What is shared is known at 24 chunks and at 32."""
    world, placer = placed_by(Objectives(5.0, 0.1))
    shared = prompt(1, chunks * CHUNK)
    for name in ("d0", "d1"):
        world.blocks(name, 68)
        world.holds(name, shared)
    for number in range(4):
        job = world.job([*shared, *prompt(10 + number, 5 * CHUNK)])
        placement = placer.place(job, DECODE, prefills=True)
        assert placement is not None
        placer.begin(placement).prefilled()
    phi = 1 - 0.012 / 0.095
    sharing, another = (
        placer.weighed(world.job(tokens))[0].ttft_s * phi
        for tokens in ([*shared, *prompt(20, 16 * CHUNK)], prompt(30, 40 * CHUNK))
    )
    # Beside a step of theirs, of which half is under way, and half ends after it.
    assert sharing == pytest.approx(0.256 + 0.012 * phi)
    assert another > 0.64 + 0.01


def test_what_best_effort_has_in_common_makes_no_room_for_those_that_overtake_it() -> None:
    """A worker of 1,600 tokens has one request of 1,448; twenty of best effort wait, which share their prompts."""
    world, placer = placed_by(Objectives(5.0, 0.1))
    for name in ("d0", "d1"):
        world.blocks(name, 100)
    for number in range(2):
        placement = placer.place(world.job(prompt(50 + number, 90 * CHUNK)), DECODE, prefills=True)
        assert placement is not None
        placer.begin(placement).prefilled()
    unhurried = [world.job([*prompt(1, 24 * CHUNK), number]) for number in range(40)]
    for job in unhurried:
        job.priority = 1
        placement = placer.place(job, DECODE, prefills=True)
        assert placement is not None
        placer.begin(placement)
    asked_for = world.job(prompt(60, 40 * CHUNK))
    phi = 1 - 0.011 / 0.095
    assert min(each.ttft_s for each in placer.weighed(asked_for)) * phi > 0.64 + 0.005


@pytest.mark.parametrize(
    "why", ["its answer has begun", "another choice has begun", "its prompt still comes", "nothing is refused"]
)
def test_nobody_is_refused_where(why: str) -> None:
    world, placer = placed_by(Objectives(0.3, 0.1), refuses=why != "nothing is refused")
    busy(world, placer)
    job = world.job(prompt(1))
    job.emitted = [7] if why == "its answer has begun" else []
    job.may_be_refused = why != "another choice has begun"
    placer.route(job, is_whole=why != "its prompt still comes")
    assert not placer.counts.refused


def test_a_conversation_goes_back_to_the_worker_that_holds_it() -> None:
    world, placer = placed_by(Objectives(5.0, 0.1))
    world.holds("d1", prompt(1))
    longer = [*prompt(1), *prompt(2, 16)]
    placement = placer.place(world.job(longer), DECODE, prefills=True)
    assert placement is not None
    assert placement.worker.worker_id == "d1"
    assert placement.work.uncomputed_tokens == 16


def test_without_given_costs_each_worker_counts_by_what_it_has_measured() -> None:
    """A step of another request takes 90 ms on the first worker, which is too long, and 10 ms on the second."""
    world, placer = placed_by(Objectives(5.0, 0.05), costs=None)
    slow, quick = wire.WorkerCosts(decode_s_per_request=0.09), wire.WorkerCosts(decode_s=0.01)
    for name, costs in (("d0", slow), ("d1", quick)):
        costs.prefill_s_per_token = 1e-3
        world.costs(name, costs)

    def where(*not_on: tuple[str, int]) -> str:
        placement = placer.place(world.job(prompt(1)), DECODE, frozenset(not_on), prefills=True)
        assert placement is not None
        return placement.worker.worker_id

    assert where(("d1", 1)) == "d0", "for want of another one, which is no try"
    assert where() == "d0", "it decodes nothing, and may be as quick as the other by now"
    best, *_, worst = placer.weighed(world.job(prompt(1)))
    assert (best.worker.worker_id, best.missed) == ("d1", 0) and best.step_s == pytest.approx(0.01)
    assert (worst.worker.worker_id, worst.missed) == ("d0", 1) and worst.step_s == pytest.approx(0.09)
    assert [where() for _ in range(3)] == ["d1"] * 3
    world.now_s += 60.0
    assert [where() for _ in range(3)] == ["d0", "d1", "d1"], "once a minute"
    prefilled = world.job(prompt(2))
    prefilled.prefilled_by = "d1"
    world.now_s += 60.0
    bound = [placer.place(prefilled, DECODE) for _ in range(2)]
    assert [each and each.worker.worker_id for each in bound] == ["d1", "d1"], "a pull is no reason to try"


def test_a_prompt_that_still_comes_is_prefilled_apart_and_never_where_it_has_to_be_whole_first() -> None:
    world, placer = placed_by(Objectives(5.0, 0.1))
    job = world.job(prompt(1))
    job.prompt_changes = True
    assert placer.weighed(job)[0].way is Way.WHOLE
    placement = placer.route(job, is_whole=False)
    assert placement is not None and placement.work.arriving
    assert placer.counts.ways == {Way.APART: 1}


def test_a_worker_that_may_fail_the_second_try_as_well_is_asked_where_there_is_no_other() -> None:
    world, placer = placed_by(Objectives(5.0, 0.1))
    doubtful = frozenset({("d0", 1)})
    for excluded, expected in ((frozenset(), "d1"), (frozenset({("d1", 1)}), "d0")):
        placement = placer.place(world.job(prompt(1)), DECODE, excluded, avoided=doubtful, prefills=True)
        assert placement is not None and placement.worker.worker_id == expected


def test_a_request_is_explained_by_the_ways_that_there_were_and_who_decodes_it() -> None:
    world, placer = placed_by(Objectives(5.0, 0.1))
    job = world.job(prompt(1))
    job.prompt_changes = True
    apart = placer.route(job, is_whole=False)
    assert apart is not None
    bound = placer.place(job, DECODE)
    assert bound is not None
    explanation = placer.log.explanation(job.request_id)
    assert explanation is not None and explanation.reason == "apart"
    assert explanation.ways[0].worker == apart.worker
    assert (explanation.worker_id, explanation.bound_worker_id) == (apart.worker.worker_id, bound.worker.worker_id)
    message = explained(explanation, "objectives")
    assert [(way.worker_id, way.way, way.missed) for way in message.ways] == [
        (each.worker.worker_id, "apart", 0) for each in explanation.ways
    ]
    assert message.ways[0].ttft_s == pytest.approx(0.16)


def test_one_that_is_refused_is_explained_and_one_that_is_supposed_leaves_nothing_behind() -> None:
    world, placer = placed_by(Objectives(0.3, 0.1))
    early = placer.supposed(placer.packed(prompt(1), PrefixScope()), 8)
    assert (early.reason, early.worker_id) == ("whole", "d0")
    busy(world, placer)
    job = world.job(prompt(1))
    with pytest.raises(OverloadedError):
        placer.route(job, is_whole=True)
    refused = placer.log.explanation(job.request_id)
    before = world.left_behind()
    supposed = placer.supposed(placer.packed(prompt(1), PrefixScope()), 8)
    assert refused is not None
    for explanation in (refused, supposed):
        assert (explanation.reason, explanation.worker_id, len(explanation.ways)) == ("refused", "", 4)
    assert world.left_behind() == before


def test_weighing_the_choices_leaves_nothing_behind() -> None:
    world, placer = placed_by(Objectives(5.0, 0.1))
    job = world.job(prompt(1))
    before = world.left_behind()
    found = placer.weighed(job)
    assert [each.cost_s for each in found] == sorted(each.cost_s for each in found)
    assert {(each.worker.worker_id, each.way) for each in found} == {
        (name, way) for name in ("d0", "d1") for way in (Way.WHOLE, Way.APART)
    }
    assert world.left_behind() == before


def test_by_policy_workers_that_do_both_are_weighed_by_their_queue_of_prompts_too() -> None:
    world = RouterWorld()
    world.without(PREFILL)
    assert type(world.placer) is Placer
    terms = {}
    for prefills in (True, False):
        job = world.job(prompt(1))
        world.placer.place(job, DECODE, prefills=prefills)
        explanation = world.placer.log.explanation(job.request_id)
        assert explanation is not None
        terms[prefills] = set(explanation.choices[-1].decision.terms)
    assert terms[True] - terms[False] == {"ttft"}
