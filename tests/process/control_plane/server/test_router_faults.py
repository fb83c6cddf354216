"""Cancels, deadlines, leases and lost workers: what the router does when a request's way is cut short.

Every test ends with a check that nothing is left: no blocks, no leases, no in-flight counts, one outcome a request.
"""

import asyncio

import grpc
import pytest
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire

from control_plane.model.lifecycle import State
from tests.fakes.answers import collected, completion_of, failure, retry_after_ms, text_of, whole_text
from tests.fakes.cluster import CLIENT_DEADLINE_S, DECODE, PREFILL, Cluster, named, running_cluster, until

# Cancelling and deadlines.


async def test_a_cancel_while_prefilling_frees_the_prefill_worker(cluster: Cluster) -> None:
    prefiller = named(cluster, "prefill-0").engine
    prefiller.hold_before(0)
    call = cluster.call()
    await prefiller.held.wait()

    call.cancel()

    await until(cluster.idle)
    assert cluster.outcomes == {State.CANCELLED: 1}
    assert named(cluster, "decode-0").engine.jobs == []


async def test_a_cancel_while_decoding_frees_both_workers(cluster: Cluster) -> None:
    decoder = named(cluster, "decode-0").engine
    decoder.hold_before(4)
    call = cluster.call(max_tokens=100)
    await decoder.held.wait()
    assert decoder.status().load.free_blocks < decoder.status().load.total_blocks

    call.cancel()

    await until(cluster.idle)
    assert cluster.outcomes == {State.CANCELLED: 1}


async def test_a_second_decode_worker_does_not_release_what_the_first_may_still_pull() -> None:
    async with running_cluster(handoff__deadline_s=5) as cluster:
        prefiller = (await cluster.add(PREFILL)).engine
        await (await cluster.add(DECODE)).crash()
        await cluster.add(DECODE)

        responses = await cluster.generate()

        status = prefiller.status()
        assert (status.load.leased_handoffs, status.counters.handoffs_released) == (1, 0)
        assert completion_of(responses).route.handoff == generation.HANDOFF_OUTCOME_RECOMPUTED
        await until(cluster.idle)
        assert prefiller.status().counters.handoffs_released == 1


async def test_a_lease_that_a_decode_worker_was_told_of_is_released_only_when_it_cannot_pull_any_more() -> None:
    async with running_cluster(handoff__deadline_s=1.0) as cluster:
        prefiller = (await cluster.add(PREFILL)).engine
        await (await cluster.add(DECODE)).crash()
        call = cluster.call()
        assert (await call.read()).delta.token_ids
        leased = prefiller.status
        await until(lambda: leased().load.leased_handoffs == 1 and not cluster.router.membership.usable(DECODE))

        call.cancel()

        await until(cluster.idle)
        assert leased().counters.handoffs_released == 1
        assert cluster.outcomes == {State.CANCELLED: 1}


async def test_the_clients_deadline_ends_a_decode_and_frees_both_workers(cluster: Cluster) -> None:
    decoder = named(cluster, "decode-0").engine
    decoder.hold_before(4)

    error = await failure(cluster.call(timeout_s=CLIENT_DEADLINE_S))

    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(cluster.idle)


async def test_a_request_whose_deadline_passed_counts_as_expired(cluster: Cluster) -> None:
    named(cluster, "decode-0").engine.hold_before(4)

    await asyncio.gather(*(failure(cluster.call(timeout_s=CLIENT_DEADLINE_S)) for _ in range(3)))

    await until(cluster.idle)
    assert cluster.outcomes == {State.EXPIRED: 3}


@pytest.mark.parametrize("held", ["prefill-0", "decode-0"])
async def test_the_routers_own_deadline_ends_a_request_without_one(held: str) -> None:
    async with running_cluster(router__request_timeout_s=0.1) as cluster:
        for pool in (PREFILL, DECODE):
            await cluster.add(pool)
        named(cluster, held).engine.hold_before(0)

        error = await failure(cluster.call())

        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(cluster.idle)
        assert cluster.outcomes == {State.EXPIRED: 1}


async def test_a_deadline_that_passes_while_waiting_for_a_decode_worker_is_told_as_such() -> None:
    async with running_cluster(router__request_timeout_s=0.05) as cluster:
        await cluster.add(PREFILL)

        error = await failure(cluster.call())

        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED


# Lost workers.


async def test_a_prefill_worker_that_is_lost_is_replaced_by_the_second(cluster_2x2: Cluster) -> None:
    await named(cluster_2x2, "prefill-0").crash()

    responses = await cluster_2x2.generate()

    assert text_of(responses) == whole_text()
    assert completion_of(responses).route.prefill_worker_id == "prefill-1"
    member = cluster_2x2.router.membership.get("prefill-0")
    assert member is not None
    assert member.is_suspect


async def test_a_prefill_engine_that_dies_under_a_request_is_replaced(cluster_2x2: Cluster) -> None:
    prefiller = named(cluster_2x2, "prefill-0").engine
    prefiller.hold_before(0)
    call = cluster_2x2.call()
    await prefiller.held.wait()

    prefiller.die("of a test")

    responses = await collected(call)
    assert text_of(responses) == whole_text()
    assert completion_of(responses).route.prefill_worker_id == "prefill-1"


async def test_the_decode_worker_prefills_itself_when_the_only_prefill_worker_is_lost(cluster: Cluster) -> None:
    await named(cluster, "prefill-0").crash()

    responses = await cluster.generate()

    assert text_of(responses) == whole_text()
    route = completion_of(responses).route
    assert (route.prefill_worker_id, route.decode_worker_id) == ("", "decode-0")
    assert route.handoff == generation.HANDOFF_OUTCOME_NONE


async def test_the_decode_worker_prefills_itself_when_there_is_no_prefill_worker(empty: Cluster) -> None:
    await empty.add(DECODE)

    responses = await empty.generate()

    assert text_of(responses) == whole_text()
    completion = completion_of(responses)
    assert completion.usage.completion_tokens == 8
    assert (completion.route.prefill_worker_id, completion.route.decode_worker_id) == ("", "decode-0")


async def test_a_decode_worker_lost_before_it_began_is_replaced_by_one_that_computes_the_prompt(
    cluster_2x2: Cluster,
) -> None:
    """Not by one that pulls: the first may have used the lease up, and its blocks may be another prompt's by now."""
    await named(cluster_2x2, "decode-0").crash()

    responses = await cluster_2x2.generate()

    assert text_of(responses) == whole_text()
    route = completion_of(responses).route
    assert (route.decode_worker_id, route.handoff) == ("decode-1", generation.HANDOFF_OUTCOME_RECOMPUTED)
    assert [job.pull for job in named(cluster_2x2, "decode-1").engine.jobs] == [None]


async def test_a_decode_worker_lost_after_it_began_ends_the_request_with_a_hint(cluster_2x2: Cluster) -> None:
    decoder = named(cluster_2x2, "decode-0").engine
    decoder.hold_before(4)
    call = cluster_2x2.call()
    await decoder.held.wait()

    decoder.die("of a test")

    error = await failure(call)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "decode-0" in (error.details() or "")
    assert retry_after_ms(error) == 1000
    await until(cluster_2x2.idle)
    assert cluster_2x2.outcomes == {State.FAILED: 1}
    assert named(cluster_2x2, "decode-1").engine.jobs == []


async def test_a_decode_worker_whose_process_ends_under_a_request_ends_it_with_a_hint(cluster: Cluster) -> None:
    decoder = named(cluster, "decode-0")
    decoder.engine.hold_before(4)
    call = cluster.call()
    await decoder.engine.held.wait()

    await decoder.crash()

    error = await failure(call)
    assert (error.code(), retry_after_ms(error)) == (grpc.StatusCode.UNAVAILABLE, 1000)
    assert cluster.router.membership.usable(DECODE) == []


async def test_a_request_that_lost_its_decode_worker_goes_on_when_that_is_restarted() -> None:
    async with running_cluster(router__queue_timeout_s=60, handoff__deadline_s=1.0) as cluster:
        prefiller = (await cluster.add(PREFILL)).engine
        await (await cluster.add(DECODE)).crash()
        call = cluster.call()
        await until(lambda: bool(prefiller.jobs) and not cluster.router.membership.usable(DECODE))

        await cluster.add(DECODE, "decode-0", number=2)

        assert text_of(await collected(call)) == whole_text()


async def test_a_worker_of_another_generation_refuses_and_the_next_one_serves(cluster_2x2: Cluster) -> None:
    for name in ("prefill-0", "decode-0"):
        stale = wire.WorkerRegistration()
        stale.CopyFrom(named(cluster_2x2, name).record)
        stale.generation = 99
        await cluster_2x2.register(stale)

    route = completion_of(await cluster_2x2.generate()).route

    assert (route.prefill_worker_id, route.decode_worker_id) == ("prefill-1", "decode-1")
    assert named(cluster_2x2, "prefill-0").engine.jobs == named(cluster_2x2, "decode-0").engine.jobs == []
