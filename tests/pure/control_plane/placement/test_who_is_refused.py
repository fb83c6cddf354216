"""Placement by the objectives: who is refused, and who is not for what may be otherwise."""

from collections import Counter

import pytest
from rachis.v1 import worker_pb2 as wire

from cluster_core.errors import OverloadedError
from control_plane.model.prefix_scope import PrefixScope
from control_plane.placement.by_objective import Objectives
from control_plane.placement.objective_placer import ObjectivePlacer
from tests.pure.control_plane.placement.router_world import CHUNK, DECODE, RouterWorld, prompt
from tests.pure.control_plane.placement.test_objective_placer import busy, placed_by
from tests.pure.control_plane.placement.test_objectives_in_service import refused


@pytest.mark.parametrize("tokens", [0, 500])
def test_a_router_that_has_just_begun_refuses_nobody_for_what_an_answer_might_become(tokens: int) -> None:
    """Bounds of 31,000 tokens, workers with memory for 20,000; of earlier answers of another bound it may know."""
    world, placer = placed_by(Objectives(5.0, 0.1))
    for name in ("d0", "d1"):
        world.blocks(name, 20_000 // CHUNK)
    for _ in range(32 if tokens else 0):
        placer.answered(world.job(prompt(1)), tokens)
    for number in range(20):
        job = world.job(prompt(number))
        job.sampling.max_tokens = 31_000
        assert placer.route(job, is_whole=True) is None
        placement = placer.place(job, DECODE, prefills=True)
        assert placement is not None and placement.work.answer_tokens == 1024
        placer.begin(placement)


def test_without_hits_nobody_is_refused() -> None:
    world, placer = placed_by(Objectives(1.0, 0.1))
    busy(world, placer, prompts=20)
    refused(world, placer, 1)
    assert placer.supposed(placer.packed(prompt(1), PrefixScope()), 8).reason == "refused"
    world.is_stale = True
    assert placer.supposed(placer.packed(prompt(1), PrefixScope()), 8).reason == "whole"
    assert placer.route(world.job(prompt(1)), is_whole=True) is None


def test_a_worker_that_took_long_to_load_an_adapter_is_tried_before_anybody_is_refused() -> None:
    world, placer = placed_by(Objectives(1.0, 0.1), costs=None)
    for name in ("d0", "d1"):
        world.costs(name, wire.WorkerCosts(prefill_s_per_token=1e-3, decode_s=0.01, adapter_load_s=6.0))
    adapter = wire.Adapter(name="a", path="/a", digest="digest")
    records = [member.registration for member in world.membership.members()]
    next(each for each in records if each.worker_id == "d0").adapters.append("digest")
    world.membership.replace(records)
    where = []
    with pytest.raises(OverloadedError):
        for number in range(20):
            job = world.job(prompt(number))
            job.scope = PrefixScope(adapter=adapter)
            assert placer.route(job, is_whole=True) is None
            placement = placer.place(job, DECODE, prefills=True)
            assert placement is not None
            placer.begin(placement)
            where.append(placement.worker.worker_id)
    assert Counter(where) == {"d0": len(where) - 1, "d1": 1}


def decoding(requests: int, *, per_request_s: float = 0.01, places: int = 64) -> tuple[RouterWorld, ObjectivePlacer]:
    """Each of two workers decodes half of so many; a step takes so long for each."""
    world, placer = placed_by(Objectives(5.0, 0.1), costs=None)
    for record in (records := [member.registration for member in world.membership.members()]):
        record.max_running_requests = places
    world.membership.replace(records)
    for name in ("d0", "d1"):
        world.costs(name, wire.WorkerCosts(prefill_s_per_token=1e-6, decode_s_per_request=per_request_s))
    for flight in busy(world, placer, prompts=requests):
        flight.prefilled()
    return world, placer


def test_with_one_request_more_all_would_miss_tpot() -> None:
    """A step of one takes 10 ms and of each further one 10 ms more: nine fit beside a block of a prompt, on each."""
    world, placer = decoding(18)
    with pytest.raises(OverloadedError, match=r"to keep objectives\.tpot_s with one request more: 0\.1 s") as error:
        placer.route(world.job(prompt(1)), is_whole=True)
    assert placer.supposed(placer.packed(prompt(1), PrefixScope()), 8).reason == "refused_for_tpot"
    # Eight tokens of 90 ms each, nine at a time.
    assert error.value.retry_after_ms == pytest.approx(8 * 90 / 9, rel=0.05)
    flight = busy(world, placer, prompts=2)[0]
    with pytest.raises(OverloadedError) as later:
        placer.route(world.job(prompt(1)), is_whole=True)
    assert later.value.retry_after_ms is not None and later.value.retry_after_ms > 100, "two have to end"
    flight.end()


def test_best_effort_is_not_refused_for_tpot_nor_is_anybody_for_its_sake() -> None:
    world, placer = decoding(18)
    best_effort = world.job(prompt(1))
    best_effort.priority = 1
    assert placer.route(best_effort, is_whole=True) is None, "it waits at the engine"
    placement = placer.place(best_effort, DECODE, prefills=True)
    assert placement is not None
    flight = placer.begin(placement)
    flight.prefilled()
    assert placer.route(world.job(prompt(2)), is_whole=True) is None
    flight.end()
    refused(world, placer, 2)


def test_what_waits_for_a_place_makes_no_step_longer() -> None:
    """Nine fit within TPOT, and no more places are there: who waits for one is in time."""
    world, placer = decoding(30, places=9)
    assert placer.route(world.job(prompt(1)), is_whole=True) is None


def test_beside_one_other_nobody_is_refused_for_tpot() -> None:
    """Two take longer than TPOT by a third, one does not: forecasts are not so good."""
    world, placer = decoding(2, per_request_s=0.065)
    assert placer.route(world.job(prompt(1)), is_whole=True) is None
