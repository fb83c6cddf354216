"""Cancels, deadlines, leases and lost workers: what the router does when a request's way is cut short.

Every test ends with a check that nothing is left: no blocks, no leases, no in-flight counts, one outcome a request.
"""

import asyncio
from typing import Any

import grpc
import pytest
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import router_pb2 as api
from rachis.v1 import worker_pb2 as wire

from control_plane.fleet.vitality import VitalityTiming
from control_plane.model.lifecycle import State
from control_plane.server.composition import RouterTiming
from tests.fakes.answers import collected, completion_of, failure, retry_after_ms, text_of, tokens_of, whole_text
from tests.fakes.cluster import CLIENT_DEADLINE_S, DECODE, PREFILL, Cluster, named, running_cluster, until

# Cancelling and deadlines.


async def test_a_cancel_while_prefilling_frees_the_prefill_worker(cluster: Cluster) -> None:
    prefiller = named(cluster, "prefill-0").engine
    prefiller.hold_before(0)
    call = cluster.call()
    await prefiller.held.wait()

    call.cancel()

    await until(cluster.idle)
    await cluster.ends_with({State.CANCELLED: 1})
    assert named(cluster, "decode-0").engine.jobs == []


async def test_a_cancel_while_decoding_frees_both_workers(cluster: Cluster) -> None:
    decoder = named(cluster, "decode-0").engine
    decoder.hold_before(4)
    call = cluster.call(max_tokens=100)
    await decoder.held.wait()
    assert decoder.status().load.free_blocks < decoder.status().load.total_blocks

    call.cancel()

    await until(cluster.idle)
    await cluster.ends_with({State.CANCELLED: 1})


async def test_a_second_decode_worker_does_not_release_what_the_first_may_still_pull() -> None:
    async with running_cluster(handoff__deadline_s=5) as cluster:
        prefiller = (await cluster.add(PREFILL)).engine
        dying = (await cluster.add(DECODE)).will_die()
        await cluster.add(DECODE)

        responses = await cluster.generate()
        await dying

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
        await cluster.ends_with({State.CANCELLED: 1})


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
    await cluster.ends_with({State.EXPIRED: 3})


@pytest.mark.parametrize("held", ["prefill-0", "decode-0"])
async def test_the_routers_own_deadline_ends_a_request_without_one(held: str) -> None:
    async with running_cluster(router__request_timeout_s=0.1) as cluster:
        for pool in (PREFILL, DECODE):
            await cluster.add(pool)
        named(cluster, held).engine.hold_before(0)

        error = await failure(cluster.call())

        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(cluster.idle)
        await cluster.ends_with({State.EXPIRED: 1})


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
    dying = named(cluster_2x2, "decode-0").will_die()

    responses = await cluster_2x2.generate()

    await dying
    assert text_of(responses) == whole_text()
    route = completion_of(responses).route
    assert (route.decode_worker_id, route.handoff) == ("decode-1", generation.HANDOFF_OUTCOME_RECOMPUTED)
    assert [job.pull for job in named(cluster_2x2, "decode-1").engine.jobs] == [None]


async def test_a_decode_worker_that_cannot_be_reached_has_not_touched_the_lease(cluster_2x2: Cluster) -> None:
    await named(cluster_2x2, "decode-0").crash()

    route = completion_of(await cluster_2x2.generate()).route

    assert (route.decode_worker_id, route.handoff) == ("decode-1", generation.HANDOFF_OUTCOME_PULLED)


@pytest.mark.parametrize("how", ["its engine dies", "its process ends", "it drains"])
@pytest.mark.parametrize("sampling", [{}, {"seed": 5, "temperature": 1.0}])
async def test_an_answer_that_has_begun_goes_on_at_another_decode_worker(
    cluster_2x2: Cluster, how: str, sampling: dict[str, Any]
) -> None:
    decoder = named(cluster_2x2, "decode-0")
    decoder.engine.hold_before(4)
    answer = aiter(cluster_2x2.call(**sampling))
    begun: list[api.GenerateResponse] = []
    while len(tokens_of(begun)) < 2:
        begun.append(await anext(answer))
    await decoder.engine.held.wait()

    match how:
        case "its engine dies":
            decoder.engine.die("of a test")
        case "its process ends":
            await decoder.crash()
        case _:
            await cluster_2x2.admin.DrainWorker(admin.DrainWorkerRequest(worker_id="decode-0"))

    responses = begun + await collected(answer)
    assert text_of(responses) == whole_text(seed=sampling.get("seed"))
    completion = completion_of(responses)
    assert (completion.route.decode_worker_id, completion.route.migrations) == ("decode-1", 1)
    assert completion.usage.completion_tokens == 8
    assert cluster_2x2.router.metrics.registry.get_sample_value("rachis_migrations_total") == 1
    (job,) = named(cluster_2x2, "decode-1").engine.jobs
    # Four at most had reached the router; one more comes from the prefill worker, where that one computes the rest.
    assert job.emitted is not None and 1 < len(job.emitted.token_ids) <= 5
    assert job.pull is not None
    prefills = [each.request_id for each in named(cluster_2x2, "prefill-0").engine.jobs]
    prefills += [each.request_id for each in named(cluster_2x2, "prefill-1").engine.jobs]
    assert len(prefills) == (1 if how == "it drains" else 2)
    assert (job.pull.lease_id in prefills) is (how != "it drains"), "a worker that drains hands the answer over"
    decoder.engine.resume()
    await until(cluster_2x2.idle)
    await cluster_2x2.ends_with({State.FINISHED: 1})


@pytest.mark.parametrize("why", ["it cannot be leased", "it hears nothing", "its last message is lost"])
async def test_an_answer_that_is_not_handed_over_in_time_is_computed_elsewhere(
    cluster_2x2: Cluster, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = named(cluster_2x2, "decode-0")
    decoder.engine.hold_before(4)
    running = asyncio.create_task(cluster_2x2.generate())
    await decoder.engine.held.wait()

    async def hand_over(request_id: str) -> bool:
        if why == "it hears nothing":
            await asyncio.Event().wait()
        return why != "it cannot be leased"

    # The stand-in's engine always hands over.
    monkeypatch.setattr(decoder.engine, "hand_over", hand_over)
    await cluster_2x2.admin.DrainWorker(admin.DrainWorkerRequest(worker_id="decode-0"))

    responses = await running
    assert text_of(responses) == whole_text()
    route = completion_of(responses).route
    assert (route.decode_worker_id, route.migrations) == ("decode-1", 1)
    jobs = [job for name in ("prefill-0", "prefill-1") for job in named(cluster_2x2, name).engine.jobs]
    assert len(jobs) == 2
    decoder.engine.resume()
    await until(cluster_2x2.idle)


async def test_a_client_that_leaves_before_the_lease_is_read_leaves_none(cluster_2x2: Cluster) -> None:
    """Its last message lies unread behind others, as where a client takes nothing."""
    first = named(cluster_2x2, "decode-0")
    first.engine.hold_before(4)
    call = cluster_2x2.call()
    await first.engine.held.wait()
    await until(lambda: len(first.engine.live_jobs()) == 1)
    (name,) = first.engine.live_jobs()

    async def handed_over_and_gone(request_id: str) -> bool:
        handed_over = await handing_over_there(request_id)
        call.cancel()
        return handed_over

    # The client leaves between the stand-in's answer and its last message.
    handing_over_there, first.engine.hand_over = first.engine.hand_over, handed_over_and_gone  # type: ignore[method-assign]
    await cluster_2x2.admin.DrainWorker(admin.DrainWorkerRequest(worker_id="decode-0"))

    await until(lambda: first.engine.live_jobs() == [])
    await until(cluster_2x2.idle)
    assert await first.engine.release(name) is False
    await cluster_2x2.ends_with({State.CANCELLED: 1})


async def test_an_answer_whose_worker_dies_when_it_has_handed_it_over_is_computed(
    cluster_2x2: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = named(cluster_2x2, "decode-0")
    first.engine.hold_before(4)
    running = asyncio.create_task(cluster_2x2.generate())
    await first.engine.held.wait()
    handing_over = first.engine.hand_over

    async def hand_over_and_die(request_id: str) -> bool:
        handed_over = await handing_over(request_id)
        asyncio.get_running_loop().call_soon(first.engine.die, "of a test")
        return handed_over

    # The stand-in cannot be made to die between its answer and its last message.
    monkeypatch.setattr(first.engine, "hand_over", hand_over_and_die)
    await cluster_2x2.admin.DrainWorker(admin.DrainWorkerRequest(worker_id="decode-0"))

    responses = await running
    assert text_of(responses) == whole_text()
    route = completion_of(responses).route
    assert (route.decode_worker_id, route.migrations) == ("decode-1", 1)
    await until(cluster_2x2.idle)


async def test_an_answer_that_may_not_move_waits_for_its_worker_to_go_on() -> None:
    timing = RouterTiming(vitality=VitalityTiming(answer_s=5.0))
    async with running_cluster(timing=timing, router__max_migrations=0) as cluster:
        await cluster.add(PREFILL)
        hanging = (await cluster.add(DECODE)).engine
        await cluster.add(DECODE)
        hanging.hold_before(4)
        running = asyncio.create_task(cluster.generate())
        await until(lambda: cluster.parts.probes.found_lost == 1)

        hanging.resume()

        responses = await running
        assert text_of(responses) == whole_text()
        assert completion_of(responses).route.decode_worker_id == "decode-0"


async def test_an_answer_leaves_a_decode_worker_that_hangs_in_mid_stream() -> None:
    async with running_cluster(timing=RouterTiming(vitality=VitalityTiming(answer_s=5.0))) as cluster:
        await cluster.add(PREFILL)
        hanging = (await cluster.add(DECODE)).engine
        await cluster.add(DECODE)
        hanging.hold_before(4)

        responses = await cluster.generate()

        assert text_of(responses) == whole_text()
        assert completion_of(responses).route.migrations == 1
        hanging.resume()
        await until(cluster.idle)


async def test_a_draining_worker_keeps_its_answers_where_nobody_else_is(cluster: Cluster) -> None:
    decoder = named(cluster, "decode-0").engine
    decoder.hold_before(4)
    call = cluster.call()
    await decoder.held.wait()
    await cluster.admin.DrainWorker(admin.DrainWorkerRequest(worker_id="decode-0"))
    await until(lambda: not cluster.router.membership.usable(DECODE))
    await asyncio.sleep(0.3)

    decoder.resume()

    route = completion_of(await collected(call)).route
    assert (route.decode_worker_id, route.migrations) == ("decode-0", 0)


async def test_an_answer_that_has_begun_ends_with_a_hint_where_no_other_decode_worker_comes(cluster: Cluster) -> None:
    decoder = named(cluster, "decode-0")
    decoder.engine.hold_before(4)
    call = cluster.call()
    await decoder.engine.held.wait()

    await decoder.crash()

    error = await failure(call)
    assert (error.code(), retry_after_ms(error)) == (grpc.StatusCode.UNAVAILABLE, 2000)
    assert cluster.router.membership.usable(DECODE) == []
    await cluster.ends_with({State.FAILED: 1})


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
