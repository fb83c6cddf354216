"""The way of a request over workers that do both, through the real router and workers' services, over fake engines.

Every test ends with a check that nothing is left: no blocks, no leases, no in-flight counts, one outcome a request.
"""

import asyncio
from collections.abc import AsyncIterator

import pytest
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire

from control_plane.model.lifecycle import State
from tests.fakes.answers import completion_of, session_text, text_of, whole_text
from tests.fakes.cluster import SHARED, Cluster, named, running_cluster, until
from tests.process.control_plane.sessions.test_session_drain import drain

NOT_HANDED_OFF, PULLED = generation.HANDOFF_OUTCOME_NONE, generation.HANDOFF_OUTCOME_PULLED


@pytest.fixture
async def pair() -> AsyncIterator[Cluster]:
    async with running_cluster(handoff__deadline_s=1.0, placement__disaggregation="conditional") as cluster:
        for _ in range(2):
            await cluster.add(SHARED)
        yield cluster


async def test_a_whole_prompt_is_prefilled_and_decoded_by_one_worker(pair: Cluster) -> None:
    responses = await pair.generate(request_id="mine")
    assert text_of(responses) == whole_text()
    route = completion_of(responses).route
    assert (route.prefill_worker_id, route.decode_worker_id, route.handoff) == ("", "shared-0", NOT_HANDED_OFF)
    explained = await pair.admin.ExplainPlacement(admin.ExplainPlacementRequest(request_id="mine"))
    assert explained.disaggregation == "whole"
    assert [decision.worker_id for decision in explained.decisions] == ["shared-0"]


async def test_requests_are_spread_over_the_workers(pair: Cluster) -> None:
    for worker in pair.workers:
        worker.engine.hold_before(2)
    running = [asyncio.create_task(pair.generate(text)) for text in ("one prompt", "another one")]
    await asyncio.gather(*(worker.engine.held.wait() for worker in pair.workers))
    for worker in pair.workers:
        worker.engine.resume()
    answers = await asyncio.gather(*running)
    assert {completion_of(answer).route.decode_worker_id for answer in answers} == {"shared-0", "shared-1"}


async def test_a_session_is_prefilled_while_it_arrives_and_decoded_where_its_kv_lies(pair: Cluster) -> None:
    session = pair.session()
    assert (await session.open("hello")).prefill_worker_id == "shared-0"
    await session.append(" world")
    await session.progressed(lambda progress: progress.ready_tokens == 10)
    await session.finish()
    events = await session.answer()
    assert text_of(events) == session_text("hello world")
    route = events[-1].completion.route
    assert (route.prefill_worker_id, route.decode_worker_id, route.handoff) == ("shared-0", "shared-0", NOT_HANDED_OFF)


async def test_a_session_whose_worker_is_full_at_its_first_token_is_pulled_by_the_other_one(pair: Cluster) -> None:
    session = pair.session()
    await session.open("hello")
    full = named(pair, "shared-0").record
    full.block_size_tokens, full.load.total_blocks = 16, 100
    await pair.register(full)
    await session.finish(" world")
    events = await session.answer()
    assert text_of(events) == session_text("hello world")
    route = events[-1].completion.route
    assert (route.prefill_worker_id, route.decode_worker_id, route.handoff) == ("shared-0", "shared-1", PULLED)


async def test_prefilled_apart_where_that_is_asked_for() -> None:
    async with running_cluster(placement__disaggregation="always") as cluster:
        for _ in range(2):
            await cluster.add(SHARED)
        route = completion_of(await cluster.generate()).route
        assert (route.prefill_worker_id, route.decode_worker_id) == ("shared-0", "shared-0"), "bound at the first token"


@pytest.mark.parametrize("tokens_before", [0, 4])
async def test_an_answer_goes_on_at_the_other_worker_when_its_own_dies(pair: Cluster, tokens_before: int) -> None:
    dying = named(pair, "shared-0")
    dying.engine.hold_before(tokens_before)
    running = asyncio.create_task(pair.generate())
    await dying.engine.held.wait()
    dying.engine.die("of a test")
    responses = await running
    assert text_of(responses) == whole_text()
    assert completion_of(responses).route.decode_worker_id == "shared-1"
    await pair.ends_with({State.FINISHED: 1})


async def test_a_session_whose_worker_dies_is_opened_at_the_other_one(pair: Cluster) -> None:
    session = pair.session()
    await session.open("hello")
    await session.append(" wide")
    named(pair, "shared-0").engine.die("of a test")
    await until(lambda: bool(named(pair, "shared-1").engine.sessions))
    await session.append(" world")
    await session.finish()
    events = await session.answer()
    assert text_of(events) == session_text("hello wide world")
    assert events[-1].completion.route.prefill_worker_id == "shared-1"


async def test_a_drain_moves_sessions_that_wait_for_input_and_takes_nothing_new(pair: Cluster) -> None:
    session = pair.session()
    assert (await session.open("hello")).prefill_worker_id == "shared-0"
    await drain(pair, "shared-0", move_sessions_after_ms=1)
    await until(lambda: bool(named(pair, "shared-1").engine.sessions))
    assert completion_of(await pair.generate()).route.decode_worker_id == "shared-1"
    await session.finish(" world")
    events = await session.answer()
    assert text_of(events) == session_text("hello world")
    assert events[-1].completion.route.decode_worker_id == "shared-1"


async def test_without_a_usable_worker_a_request_waits_for_one() -> None:
    async with running_cluster(placement__disaggregation="conditional") as cluster:
        running = asyncio.create_task(cluster.generate())
        await until(lambda: cluster.router.membership.usable(wire.POOL_DECODE) == [])
        await cluster.add(SHARED)
        assert text_of(await running) == whole_text()
