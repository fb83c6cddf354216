"""Roles where workers come and go, routers are several, the index is stale and sessions have cached what they bring."""

import math
from functools import partial

import pytest
from rachis.v1 import worker_pb2 as wire

from control_plane.model.prefix_scope import PrefixScope
from control_plane.placement.by_objective import Objectives, Way
from control_plane.placement.explanation import pool_choices
from control_plane.placement.objective_placer import BothRules, ObjectivePlacer
from tests.pure.control_plane.placement.router_world import CHUNK, DECODE, RouterWorld, prompt
from tests.pure.control_plane.placement.test_objective_placer import COSTS, busy, placed_by

# What has come at one moment is taken for what comes in so many seconds in the mean.
OVER_S = 20 * -math.expm1(-6 / 20)


def four_workers(prefill_heavy: float | None = None) -> tuple[RouterWorld, ObjectivePlacer]:
    """d0, d1, p0 and p1, by name."""
    rules = BothRules(Objectives(5.0, 0.1), COSTS, prefill_heavy)
    world = RouterWorld(make_placer=partial(ObjectivePlacer, rules))
    world.does_both()
    assert isinstance(world.placer, ObjectivePlacer)
    return world, world.placer


def joins(world: RouterWorld, worker: str) -> None:
    records = [member.registration for member in world.membership.members()]
    one_more = wire.WorkerRegistration()
    one_more.CopyFrom(records[-1])
    one_more.worker_id = worker
    world.membership.replace([*records, one_more])


def look(world: RouterWorld, placer: ObjectivePlacer, seconds: float = 10.0) -> int:
    """Some look in so many seconds, as requests would have it; how many are prefill-heavy then."""
    for _ in range(round(seconds / 2)):
        world.now_s += 2.0
        placer.told_roles()
    return placer.prefill_heavy()


def who_is_heavy(world: RouterWorld, placer: ObjectivePlacer) -> set[str]:
    """Those that no whole request may go to."""
    by_way: dict[Way, set[str]] = {way: set() for way in Way}
    for each in placer.weighed(world.job(prompt(77))):
        by_way[each.way].add(each.worker.worker_id)
    return by_way[Way.APART] - by_way[Way.WHOLE]


def states(world: RouterWorld, worker: str, state: "wire.WorkerState.ValueType") -> None:
    records = [member.registration for member in world.membership.members()]
    next(each for each in records if each.worker_id == worker).state = state
    world.membership.replace(records)


def test_nobody_takes_the_place_of_a_prefill_heavy_worker_that_is_away_until_it_is_gone() -> None:
    world, placer = four_workers()
    joins(world, "p2")
    placer.roles.prompt(100.0, world.now_s)
    assert look(world, placer) == 1
    assert who_is_heavy(world, placer) == {"d0"}
    [d0, *_] = world.membership.usable(DECODE)
    world.membership.suspect(d0)
    assert who_is_heavy(world, placer) == set()
    world.membership.trust(d0)
    assert who_is_heavy(world, placer) == {"d0"}
    states(world, "d0", wire.WORKER_STATE_DRAINING)
    assert who_is_heavy(world, placer) == set()
    world.membership.replace([each.registration for each in world.membership.members() if each.worker_id != "d0"])
    assert who_is_heavy(world, placer) == {"d1"}


def test_a_router_without_requests_looks_as_well() -> None:
    world, placer = four_workers()
    placer.roles.prompt(100.0, world.now_s)
    assert look(world, placer) == 1
    assert look(world, placer, 120.0) == 0
    assert four_workers(0.5)[1].prefill_heavy() == 2
    assert RouterWorld().placer.prefill_heavy() == 0


def test_of_four_workers_one_that_is_away_for_a_moment_takes_no_role_along() -> None:
    world, placer = four_workers()
    placer.roles.prompt(100.0, world.now_s)
    assert look(world, placer) == 1
    [_, d1, *_] = world.membership.usable(DECODE)
    world.membership.suspect(d1)
    assert look(world, placer, 4.0) == 0, "of three workers none decodes little"
    world.membership.trust(d1)
    assert who_is_heavy(world, placer) == {"d0"}


def test_a_router_without_requests_of_its_own_has_the_roles_of_the_one_that_places_them() -> None:
    (one, busy), (other, idle) = four_workers(), four_workers()
    busy.roles.prompt(100.0, one.now_s)
    for number in range(4):
        rate = busy.roles.prompts(one.now_s)
        told = wire.RouterLoads(number=number, prefill_rate=rate, prefill_heavy=busy.prefill_heavy())
        other.membership.others.heard("busy", told, other.now_s)
        assert look(one, busy, 2.0) == look(other, idle, 2.0)
    assert idle.roles.heavy(4) == 1


def test_between_the_thresholds_a_router_that_starts_has_the_roles_of_the_others() -> None:
    """4.25% of four workers."""
    world, placer = four_workers()
    told = wire.RouterLoads(number=1, prefill_rate=0.17, prefill_heavy=1)
    world.membership.others.heard("busy", told, world.now_s)
    assert look(world, placer) == 1


def test_while_hits_are_not_known_roles_stay_and_prompts_count_for_nothing() -> None:
    world, placer = four_workers()
    world.is_stale = True
    for number in range(20):
        world.now_s += 1.0
        assert placer.place(world.job(prompt(number, 100 * CHUNK)), DECODE, prefills=True) is not None
    assert placer.told_roles() == (0.0, 0)
    assert placer.counts.load_only == 20
    world.is_stale = False
    placer.roles.prompt(100.0, world.now_s)
    assert look(world, placer) == 1
    world.is_stale = True
    assert look(world, placer, 600.0) == 1
    world.is_stale = False
    assert look(world, placer, 20.0) == 1, "what came before it still counts"


def test_what_a_session_has_found_cached_counts_for_nothing() -> None:
    """Of 1,600 tokens at a millisecond each, 1,440; one worker is slow, and another one has not loaded the adapter."""
    world, placer = four_workers()
    slow = wire.WorkerCosts()
    slow.CopyFrom(world.membership.members()[0].registration.costs)
    slow.prefill_s_per_token = 1.0
    world.costs("d0", slow)
    session = world.job(prompt(1, 100 * CHUNK))
    session.scope = PrefixScope(adapter=wire.Adapter(name="a", path="/a", digest="digest"))
    session.prompt_changes, session.prefilled_by, session.cached_tokens = True, "d1", 90 * CHUNK
    placer.keep(session)
    assert placer.told_roles().prefill_rate == pytest.approx(0.16 / OVER_S)


def test_a_session_that_has_lost_its_worker_counts_where_its_prompt_is_computed() -> None:
    world, placer = four_workers()
    session = world.job(prompt(1))
    session.prompt_changes = True
    placer.keep(session)
    assert placer.told_roles().prefill_rate == 0
    assert placer.place(session, DECODE, prefills=True) is not None
    assert placer.told_roles().prefill_rate == pytest.approx(0.16 / OVER_S)


def test_whom_a_lookup_says_would_be_chosen() -> None:
    world, placer = placed_by(Objectives(5.0, 0.1))
    [choice] = pool_choices(placer.supposed(placer.packed(prompt(1), PrefixScope()), 8), "objectives")
    assert (choice.pool, choice.worker_id, choice.policy, choice.equals) == (wire.POOL_SHARED, "d0", "objectives", 1)
    busy(world, placer, prompts=100)
    [choice] = pool_choices(placer.supposed(placer.packed(prompt(1), PrefixScope()), 8), "objectives")
    assert (choice.worker_id, choice.policy, choice.equals) == ("", "objectives", 0)
    world.membership.replace([])
    [choice] = pool_choices(placer.supposed(placer.packed(prompt(1), PrefixScope()), 8), "objectives")
    assert (choice.worker_id, choice.policy, choice.equals) == ("", "", 0)
