"""The check of the index against what the pools hold: over the router's admin service, and alone.

The claims of the fake engines go to the router's index directly instead of through Redis.
"""

import asyncio
import itertools

import numpy as np
import pytest
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import worker_pb2 as wire

from cluster_core.errors import UnavailableError
from control_plane.fleet.membership import Membership
from control_plane.prefix_index.index import PrefixIndex
from control_plane.prefix_index.index_check import IndexCheck, compared
from kv_transfer.claims.claims import ClaimChange
from kv_transfer.claims.prefix_chunks import Keys, short_name
from tests.fakes.cluster import PREFILL, Cluster, named
from tests.fakes.indexed_cluster import CHUNK, PROMPT, cache, index_of, keys_of


async def check(cluster: Cluster) -> dict[str, admin.WorkerCheck]:
    response = await cluster.admin.CheckIndex(admin.CheckIndexRequest())
    return {worker.worker_id: worker for worker in response.workers}


# Over the admin service.


async def test_an_index_that_says_the_truth_passes_the_check(cluster: Cluster) -> None:
    await cluster.generate(PROMPT)
    await cluster.generate("another prompt that fills a chunk of the index")

    checks = await check(cluster)

    assert list(checks) == ["decode-0", "prefill-0", "prefill-1"]
    assert checks["decode-0"].device.agreed == len(PROMPT) // CHUNK + 1
    assert all(each.device.missing == each.device.untrue == each.host.untrue == 0 for each in checks.values())
    assert cluster.parts.check.untrue == {"decode-0": 0, "prefill-0": 0, "prefill-1": 0}


async def test_what_the_index_claims_and_no_pool_holds_is_found_and_named(cluster: Cluster) -> None:
    cache(named(cluster, "prefill-0"), PROMPT)
    index = index_of(cluster)
    untrue = keys_of("thirty-two bytes of nobody's own!")
    index.apply("prefill-0", ClaimChange(device_stored=untrue))
    index.apply("prefill-1", ClaimChange(host_stored=untrue))
    index.apply("prefill-0", ClaimChange(device_removed=keys_of(PROMPT)[:2]))

    checks = await check(cluster)

    first, second = checks["prefill-0"], checks["prefill-1"]
    assert (first.device.agreed, first.device.missing, first.device.untrue) == (len(PROMPT) // CHUNK - 2, 2, 1)
    assert list(first.device.untrue_names) == [short_name(int(untrue[0]))]
    assert (second.host.untrue, second.device.untrue) == (1, 0)
    assert cluster.parts.check.untrue == {"decode-0": 0, "prefill-0": 1, "prefill-1": 1}


async def test_a_worker_that_does_not_answer_is_told_and_the_others_are_compared(cluster: Cluster) -> None:
    await named(cluster, "prefill-0").crash()
    await cluster.register(
        wire.WorkerRegistration(worker_id="prefill-9", generation=2, pool=PREFILL, state=wire.WORKER_STATE_STARTING)
    )

    checks = await check(cluster)

    assert checks["prefill-0"].error and not checks["prefill-0"].HasField("device")
    assert checks["prefill-9"].error == "it is starting"
    assert not checks["prefill-1"].error and checks["prefill-1"].HasField("device")
    assert set(cluster.parts.check.untrue or ()) == {"prefill-1", "decode-0"}


async def test_of_a_worker_that_has_left_no_untrue_claims_are_told_any_more(cluster: Cluster) -> None:
    index_of(cluster).apply("prefill-0", ClaimChange(device_stored=keys_of("thirty-two bytes of nobody's own!")))
    await check(cluster)
    assert cluster.parts.check.untrue == {"decode-0": 0, "prefill-0": 1, "prefill-1": 0}

    membership = cluster.parts.membership
    membership.replace(each.registration for each in membership.members() if each.worker_id != "prefill-0")

    assert cluster.parts.check.untrue == {"decode-0": 0, "prefill-1": 0}


# Alone.


KEYS = np.arange(1, 7, dtype=np.uint64)


def alone() -> tuple[Membership, PrefixIndex]:
    """One worker with all of KEYS on the device, as the index believes."""
    membership, index = Membership(), PrefixIndex(1024, 600.0)
    record = wire.WorkerRegistration(worker_id="prefill-0", generation=1, pool=PREFILL, address="somewhere")
    membership.replace([record])
    index.join("prefill-0", 1)
    index.apply("prefill-0", ClaimChange(device_stored=KEYS))
    return membership, index


def answer(*keys: int, generation_number: int = 1) -> wire.GetPrefixClaimsResponse:
    held = np.array(keys, dtype="<u8").tobytes()
    return wire.GetPrefixClaimsResponse(generation=generation_number, device=held)


async def test_what_is_still_on_its_way_from_the_worker_is_no_difference() -> None:
    membership, index = alone()
    looks = 0

    async def ask(_address: str, _timeout_s: float) -> wire.GetPrefixClaimsResponse:
        nonlocal looks
        looks += 1
        if looks == 2:
            index.apply("prefill-0", ClaimChange(device_removed=KEYS[:2], device_stored=KEYS[:1] + np.uint64(100)))
        return answer(3, 4, 5, 6, 101)

    told = (await IndexCheck(membership, index, ask, settle_s=5.0, between_s=0.0).run()).workers[0]

    assert looks == 2
    assert (told.device.agreed, told.device.missing, told.device.untrue) == (5, 0, 0)


async def test_only_what_every_look_finds_different_is_a_difference() -> None:
    """The worker stores and evicts all the time: one key is behind in each look, and one is untrue for good."""
    membership, index = alone()
    looks = iter(range(1, 100))

    async def ask(_address: str, _timeout_s: float) -> wire.GetPrefixClaimsResponse:
        behind = next(looks) % 4 + 1
        return answer(*(key for key in (1, 2, 3, 4, 6) if key != behind), 200 + behind)

    # Each look at the clock is a millisecond later, however long the looks take.
    now_s = itertools.count(0.0, 0.001).__next__
    told = (await IndexCheck(membership, index, ask, settle_s=0.05, between_s=0.001, now_s=now_s).run()).workers[0]

    assert (told.device.missing, told.device.untrue) == (0, 1)
    assert list(told.device.untrue_names) == [short_name(5)]


async def test_others_have_the_loop_between_two_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    membership, index = Membership(), PrefixIndex(1024, 600.0)
    names = [f"prefill-{number}" for number in range(4)]
    membership.replace(wire.WorkerRegistration(worker_id=name, generation=1, address="somewhere") for name in names)
    turns, read_in, claims = 0, [], index.claims

    def noted(worker_id: str) -> tuple[Keys, Keys]:
        read_in.append(turns)
        return claims(worker_id)

    async def take_turns() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async def ask(_address: str, _timeout_s: float) -> wire.GetPrefixClaimsResponse:
        return answer()

    # Nothing but the turn of the loop in which it is called tells one that holds it up from one that does not.
    monkeypatch.setattr(index, "claims", noted)
    others = asyncio.create_task(take_turns())
    await IndexCheck(membership, index, ask, settle_s=0.0).run()
    others.cancel()

    assert len(set(read_in)) == len(names)


async def test_claims_of_a_start_that_is_over_are_untrue() -> None:
    membership, index = alone()

    async def ask(_address: str, _timeout_s: float) -> wire.GetPrefixClaimsResponse:
        return answer(generation_number=2)

    told = (await IndexCheck(membership, index, ask, settle_s=0.0).run()).workers[0]

    assert (told.index_generation, told.generation, told.device.untrue) == (1, 2, len(KEYS))


async def test_a_worker_that_stops_answering_is_not_compared() -> None:
    membership, index = alone()
    answers = [answer(1)]

    async def ask(_address: str, _timeout_s: float) -> wire.GetPrefixClaimsResponse:
        if not answers:
            raise UnavailableError("gone")
        return answers.pop()

    told = (await IndexCheck(membership, index, ask, settle_s=5.0, between_s=0.0).run()).workers[0]

    assert (told.error, told.HasField("device")) == ("gone", False)


async def test_a_check_is_bounded_when_the_index_never_agrees() -> None:
    membership, index = alone()

    async def ask(_address: str, _timeout_s: float) -> wire.GetPrefixClaimsResponse:
        return answer()

    async with asyncio.timeout(60):
        told = await IndexCheck(membership, index, ask, settle_s=0.02, between_s=0.001).run()

    assert told.workers[0].device.untrue == len(KEYS)
    assert told.took_s >= told.workers[0].after_s > 0


def test_two_sets_of_claims_are_compared_whatever_their_order() -> None:
    look = compared(np.array([3, 1, 2], dtype=np.uint64), np.array([2, 4, 3], dtype=np.uint64))

    assert (look.agreed, look.missing.tolist(), look.untrue.tolist()) == (2, [4], [1])
