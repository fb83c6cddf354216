"""Placement by the objectives refuses nobody for prompts that engines compute later: tenants and priorities."""

from functools import partial
from random import Random
from typing import Any

import pytest
from rachis.v1 import worker_pb2 as wire

from cluster_core.errors import OverloadedError
from cluster_core.tenant_shares import Claimant, TenantShares
from control_plane.model.prefix_scope import PrefixScope
from control_plane.placement.by_objective import Objectives
from control_plane.placement.flight import Flight
from control_plane.placement.objective_placer import BothRules, ObjectivePlacer
from tests.pure.control_plane.placement.router_world import DECODE, PREFILL, RouterWorld
from tests.pure.control_plane.placement.test_objective_placer import COSTS, placed_by


class Asking:
    """Prompts that have nothing in common, a millisecond a token, at two workers, within 2 s."""

    def __init__(self, max_tokens: int = 8) -> None:
        self.world, self.placer = placed_by(Objectives(2.0, 0.1))
        self._max_tokens = max_tokens
        self.begun: list[tuple[str, Flight]] = []
        self._asked = 0

    def ask(self, tenant: str, tokens: int, priority: int = 0, weight: float = 0.0) -> int | None:
        """When to come back, in ms; None: it was taken."""
        self._asked += 1
        job = self.world.job(list(range(self._asked * 3000, self._asked * 3000 + tokens)))
        job.tenant, job.priority = tenant, priority
        job.sampling.max_tokens = self._max_tokens
        job.share = wire.TenantShare(tenant_id=tenant, weight=weight)
        try:
            assert self.placer.route(job, is_whole=True) is None
        except OverloadedError as error:
            assert error.retry_after_ms is not None
            return error.retry_after_ms
        placement = self.placer.place(job, DECODE, prefills=True)
        assert placement is not None
        self.begun.append((placement.worker.worker_id, self.placer.begin(placement)))
        return None

    def flood(self, tenant: str = "greedy", priority: int = 0, weight: float = 0.0) -> None:
        """Until nothing more of it is in time, however short."""
        for tokens in (600, 100, 20):
            while self.ask(tenant, tokens, priority, weight) is None:
                pass


def test_who_has_nothing_at_the_engines_is_taken_beside_who_has_all() -> None:
    asking = Asking()
    asking.flood()
    assert asking.ask("greedy", 20) is not None
    assert asking.ask("polite", 600) is None
    # Two turns of 0.95 s each are in time on either worker, and no more.
    assert asking.ask("polite", 600) is None
    assert asking.ask("polite", 600) is not None


def test_a_request_that_is_only_supposed_is_taken_or_refused_as_one_of_its_tenant() -> None:
    asking = Asking()
    asking.flood(weight=0.25)
    prompt = asking.placer.packed(list(range(1200)), PrefixScope())
    supposed = [
        asking.placer.supposed(prompt, 8, tenant=tenant, weight=weight).reason
        for tenant, weight in (("greedy", 0.25), ("polite", 0.25), ("polite", 1.0))
    ]
    assert supposed == ["refused", "refused", "whole"]


def test_a_lower_number_is_not_refused_for_higher_ones_nor_a_higher_one_taken_beside_lower_ones() -> None:
    asking = Asking()
    asking.flood(priority=0)
    assert asking.ask("greedy", 1500, priority=-5) is None
    asking = Asking()
    asking.flood(priority=-5)
    assert asking.ask("polite", 20, priority=0) is not None
    assert asking.ask("polite", 20, priority=1) is not None


def test_a_weight_is_a_part_of_the_time() -> None:
    """A prompt of 1.2 s beside a flood: with the flood's weight it takes 2.4 s, with four times as much 1.5 s."""
    for weight in (0.0, 0.25):
        asking = Asking()
        asking.flood(weight=weight)
        usual = weight or 1.0
        assert asking.ask("polite", 1200, weight=usual) is not None
        assert asking.ask("polite", 1200, weight=4 * usual) is None


def test_places_that_others_wait_for_behind_it_are_free_for_it() -> None:
    """Four places each, for answers of 14 s; one tenant's prompts of 0.1 s wait for all of them, three of four after
    it."""
    asking = Asking(max_tokens=1000)
    for record in (records := [member.registration for member in asking.world.membership.members()]):
        record.max_running_requests = 4
    asking.world.membership.replace(records)
    assert [asking.ask("greedy", 100) for _ in range(8)] == [None] * 8
    assert asking.ask("greedy", 100) is not None
    assert asking.ask("polite", 100) is None


def test_what_waits_at_another_router_is_not_before_it_either() -> None:
    flooding, asking = Asking(), Asking()
    flooding.flood()
    told = wire.RouterLoads(number=1, workers=flooding.world.membership.shares(flooding.world.now_s))
    asking.world.membership.others.heard("flooded", told, asking.world.now_s)
    assert asking.ask("greedy", 20) is not None
    assert asking.ask("polite", 600) is None


def test_who_asks_again_and_again_sends_nobody_else_away() -> None:
    """Twenty refusals of one tenant; the first one of another comes back when it is in time itself."""
    asking = Asking()
    asking.flood()
    assert [asking.ask("polite", 600) for _ in range(2)] == [None, None]
    for _ in range(20):
        asking.ask("greedy", 600)
    # 1.2 s of it on either worker, and as much again of the other tenant, where 1.9 s are in time; and a step of eight.
    assert asking.ask("polite", 600) == pytest.approx(519, abs=1)


class FairWorker:
    """Computes prompts by turns."""

    def __init__(self) -> None:
        self.shares, self.lines = TenantShares(), dict[str, list[tuple[Flight, float]]]()

    def comes(self, tenant: str, flight: Flight, seconds: float) -> None:
        if tenant not in self.lines:
            self.shares.comes(Claimant(0, tenant))
        self.lines.setdefault(tenant, []).append((flight, seconds))

    def step(self, step_s: float) -> str | None:
        """Whose prompt is computed by now."""
        if not self.lines:
            return None
        tenant = min(self.lines, key=lambda each: self.shares.start(Claimant(0, each)))
        self.shares.begins(Claimant(0, tenant), step_s * 1000, 1.0)
        flight, left_s = self.lines[tenant][0]
        self.lines[tenant][0] = (flight, left_s - step_s)
        if left_s - step_s > 1e-9:
            return None
        self.lines[tenant].pop(0)
        if not self.lines[tenant]:
            del self.lines[tenant]
            self.shares.leaves(Claimant(0, tenant))
        flight.prefilled()
        flight.end()
        return tenant


def test_a_tenant_that_heeds_hints_has_what_it_asks_for_beside_one_that_does_not() -> None:
    """Fifteen seconds: one asks for 40 tokens every 20 ms whatever it is told, another one for 400 twice a second, less
    than its half of two workers."""
    asking, workers = Asking(), {"d0": FairWorker(), "d1": FairWorker()}
    computed = {"greedy": 0, "polite": 0}
    refused = {"greedy": 0, "polite": 0}
    back_s = asking.world.now_s + 2.0

    def ask(tenant: str, tokens: int) -> float:
        told = asking.ask(tenant, tokens)
        if told is None:
            name, flight = asking.begun.pop()
            workers[name].comes(tenant, flight, tokens / 1000)
        refused[tenant] += told is not None
        return (told or 0) / 1000

    for _ in range(750):
        asking.world.now_s += 0.02
        for worker in workers.values():
            done = worker.step(0.02)
            if done is not None:
                computed[done] += 40 if done == "greedy" else 400
        while not ask("greedy", 40):
            pass
        if asking.world.now_s >= back_s:
            back_s = asking.world.now_s + (ask("polite", 400) or 0.5)
    assert refused["polite"] == 0 < refused["greedy"]
    assert computed["polite"] > 0.9 * 13 * 800
    assert sum(computed.values()) > 0.95 * 30_000, "nothing is left idle for it"


class AllBefore(ObjectivePlacer):
    # What placement was before it knew of turns: there is no other way to have both in one test.
    def _behind(self, *_: Any) -> None:
        return None


def played(make: type[ObjectivePlacer], seed: int, whose: list[tuple[str, int]]) -> list[object]:
    """Where 150 requests went, what was expected of them and what they were told."""
    rules = BothRules(Objectives(1.0, 0.1), COSTS, None, True, 3.0)
    world, rng = RouterWorld(make_placer=partial(make, rules)), Random(seed)
    world.without(PREFILL)
    placer, seen = world.placer, list[object]()
    assert isinstance(placer, ObjectivePlacer)
    flights: list[Flight] = []
    for number in range(150):
        world.now_s += rng.random() * 0.3
        for flight in [each for each in flights if rng.random() < 0.15]:
            flight.prefilled()
            if rng.random() < 0.5:
                flight.end()
                flights.remove(flight)
        job = world.job([number * 2000 + token for token in range(rng.randrange(20, 1500))])
        job.tenant, job.priority = rng.choice(whose)
        seen += [(each.worker.worker_id, each.way, each.ttft_s, each.cost_s) for each in placer.weighed(job)]
        try:
            placement = placer.route(job, is_whole=True) or placer.place(job, DECODE, prefills=True)
        except OverloadedError as error:
            seen.append(error.retry_after_ms)
            continue
        assert placement is not None
        seen.append(placement.worker.worker_id)
        flights.append(placer.begin(placement))
    return seen


@pytest.mark.parametrize("whose", [[("", 0)], [("a", 0)], [("a", 1)], [("", 0), ("", 1)]])
@pytest.mark.parametrize("seed", [1])
def test_of_one_tenant_all_figures_are_what_they_were(whose: list[tuple[str, int]], seed: int) -> None:
    """Best effort beside others included: it has its own queue already."""
    seen = played(ObjectivePlacer, seed, whose)
    assert seen == played(AllBefore, seed, whose)
    assert sum(isinstance(each, int) for each in seen) > 10, "many are refused"


def test_of_two_tenants_they_are_not() -> None:
    whose = [("a", 0), ("b", 0)]
    assert played(ObjectivePlacer, 1, whose) != played(AllBefore, 1, whose)
