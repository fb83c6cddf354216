"""Sessions that wait for their clients keep nobody from the router, and no client opens more than its share."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from rachis.v1 import router_pb2 as api
from rachis.v1 import worker_pb2 as wire

from control_plane.intake.prompt_memory import TOKEN_BYTES
from control_plane.model.lifecycle import State
from tests.fakes.answers import retry_after_ms, session_text, text_of, whole_text
from tests.fakes.cluster import DECODE, PREFILL, BytesTokenizer, Cluster, running_cluster, until
from tests.process.control_plane.sessions.test_session_drain import drain

SLOTS = 8


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with running_cluster(
        router__max_in_flight_requests=SLOTS, router__max_queued_requests=4, router__queue_timeout_s=60
    ) as cluster:
        for pool in (PREFILL, DECODE):
            await cluster.add(pool)
        yield cluster


@asynccontextmanager
async def one_slot(*pools: wire.Pool.ValueType) -> AsyncIterator[Cluster]:
    """A router that works on one request at a time, and a worker of each of the pools."""
    async with running_cluster(router__max_in_flight_requests=1, router__queue_timeout_s=60) as cluster:
        for pool in pools:
            await cluster.add(pool)
        yield cluster


def _is_left(cluster: Cluster, worker_id: str) -> bool:
    """The router has nothing there."""
    member = cluster.router.membership.get(worker_id)
    return member is not None and member.in_flight_requests == 0


async def test_as_many_idle_sessions_as_there_are_slots_keep_nobody_out_and_are_answered_in_the_end(
    cluster: Cluster,
) -> None:
    sessions = [cluster.session() for _ in range(SLOTS)]
    for number, session in enumerate(sessions):
        await session.open(f"prompt {number}")
    await until(lambda: cluster.parts.admission.in_flight == 0)

    for _ in range(3):
        assert text_of(await cluster.generate()) == whole_text()

    for session in sessions:
        await session.append(" and more")
        await session.finish()
    for number, session in enumerate(sessions):
        assert text_of(await session.answer()) == session_text(f"prompt {number} and more")
    await until(cluster.idle)
    await cluster.ends_with({State.FINISHED: SLOTS + 3})
    assert cluster.parts.admission.in_flight == 0


async def test_a_session_that_computes_has_a_slot(cluster: Cluster) -> None:
    engine = cluster.workers[0].engine
    engine.compute_at_most(3)
    session = cluster.session()
    await session.open("a prompt of which only three tokens are computed")
    await until(lambda: engine.status().load.running_requests == 1)
    assert cluster.parts.admission.in_flight == 1
    engine.resume()
    await until(lambda: cluster.parts.admission.in_flight == 0)
    session.call.cancel()
    await until(cluster.idle)


async def test_without_prefill_workers_idle_sessions_keep_nobody_out_and_take_a_slot_at_their_finish() -> None:
    async with one_slot(DECODE) as cluster:
        admission, decoder = cluster.parts.admission, cluster.workers[0].engine
        sessions = [cluster.session() for _ in range(3)]
        for session in sessions:
            await session.open("hello")
            assert admission.in_flight == 0
            await session.append(" world")
            await session.progressed(lambda progress: progress.inputs == 1)
            assert (admission.in_flight, admission.queued) == (0, 0)
        assert text_of(await cluster.generate()) == whole_text()
        await until(lambda: admission.in_flight == 0)

        decoder.hold_before(3)
        await sessions[0].finish()
        await decoder.held.wait()
        assert admission.in_flight == 1
        await sessions[1].finish()
        await until(lambda: admission.queued == 1)
        decoder.resume()
        await sessions[2].finish()

        for session in sessions:
            assert text_of(await session.answer()) == session_text("hello world")
        await until(cluster.idle)
        assert (admission.in_flight, admission.queued) == (0, 0)
        admission.check_invariants()


async def test_a_session_gives_its_slot_back_when_its_last_prefill_worker_is_lost_and_goes_on_without() -> None:
    async with one_slot(PREFILL, DECODE) as cluster:
        admission, prefiller = cluster.parts.admission, cluster.workers[0]
        prefiller.engine.compute_at_most(3)
        session = cluster.session()
        await session.open("hello wide")
        assert admission.in_flight == 1

        await prefiller.crash()
        await until(lambda: admission.in_flight == 0)

        # The pool is back: others are prefilled there, and this one waits for its whole prompt.
        again = (await cluster.add(PREFILL)).engine
        await session.append(" world")
        await session.progressed(lambda progress: progress.inputs == 1)
        assert admission.in_flight == 0
        assert text_of(await cluster.generate()) == whole_text()
        assert (len(again.jobs), again.sessions) == (1, [])
        await session.finish()
        assert text_of(await session.answer()) == session_text("hello wide world")


async def test_an_input_that_waits_for_a_slot_while_the_prefill_worker_is_lost_does_not_keep_it() -> None:
    async with one_slot(PREFILL, DECODE) as cluster:
        admission, prefiller = cluster.parts.admission, cluster.workers[0]
        session = cluster.session()
        await session.open("hello")
        await until(lambda: admission.in_flight == 0)
        taken = await admission.take()
        await session.append(" world")
        await until(lambda: admission.queued == 1)

        await prefiller.crash()
        await until(lambda: not cluster.router.membership.usable(PREFILL))
        taken.release()

        await session.progressed(lambda progress: progress.inputs == 1)
        assert (admission.in_flight, admission.queued) == (0, 0)
        await session.finish()
        assert text_of(await session.answer()) == session_text("hello world")


@pytest.mark.parametrize("finishes", [False, True], ids=["append", "finish"])
async def test_an_input_that_waits_for_a_slot_while_its_session_moves_is_computed_once(finishes: bool) -> None:
    async with one_slot(PREFILL, PREFILL, DECODE) as cluster:
        admission, (first, second, _) = cluster.parts.admission, cluster.workers
        session = cluster.session()
        await session.open("hello")
        await until(lambda: admission.in_flight == 0)
        taken = await admission.take()
        await (session.finish(" world") if finishes else session.append(" world"))
        await until(lambda: admission.queued == 1)

        await drain(cluster, first.name, move_sessions_after_ms=0)
        await until(lambda: _is_left(cluster, first.name))
        await asyncio.sleep(0.1)
        assert not second.engine.sessions
        taken.release()

        if not finishes:
            await session.finish()
        events = await session.answer()
        assert text_of(events) == session_text("hello world")
        completion = events[-1].completion
        assert completion.usage.prompt_tokens == len("hello world")
        assert 0 <= completion.session.ttft_from_finish_ms <= completion.session.ttft_from_open_ms


async def test_an_idle_session_that_moves_is_computed_again_once_a_slot_is_free_and_takes_no_place_in_the_queue() -> (
    None
):
    async with one_slot(PREFILL, PREFILL, DECODE) as cluster:
        admission, (first, second, _) = cluster.parts.admission, cluster.workers
        session = cluster.session()
        await session.open("hello")
        await until(lambda: admission.in_flight == 0)
        taken = await admission.take()

        await drain(cluster, first.name, move_sessions_after_ms=0)
        await until(lambda: _is_left(cluster, first.name))
        await asyncio.sleep(0.1)
        assert not second.engine.sessions and (admission.in_flight, admission.queued) == (1, 0)
        second.engine.compute_at_most(3)
        taken.release()

        await until(lambda: bool(second.engine.sessions))
        assert admission.in_flight == 1
        second.engine.resume()
        await until(lambda: admission.in_flight == 0)
        await session.append(" world")
        await session.finish()
        assert text_of(await session.answer()) == session_text("hello world")
        admission.check_invariants()


async def test_a_finished_session_keeps_its_slot_though_its_last_prefill_worker_is_lost() -> None:
    async with one_slot(PREFILL, DECODE) as cluster:
        admission, (prefiller, decoder) = cluster.parts.admission, cluster.workers
        dying = prefiller.will_die()
        decoder.engine.hold_before(3)
        session = cluster.session()
        await session.open("hello")
        await session.finish()
        await dying
        await decoder.engine.held.wait()

        assert admission.in_flight == 1

        decoder.engine.resume()
        assert text_of(await session.answer()) == session_text("hello")


@pytest.mark.parametrize("finishes", [False, True], ids=["while it waits for input", "while its finish waits"])
async def test_a_session_without_a_prefill_worker_that_is_cancelled_leaves_nothing(finishes: bool) -> None:
    async with one_slot(DECODE) as cluster:
        admission = cluster.parts.admission
        session = cluster.session()
        await session.open("hello")
        taken = await admission.take()
        if finishes:
            await session.finish()
            await until(lambda: admission.queued == 1)

        session.call.cancel()

        await cluster.ends_with({State.CANCELLED: 1})
        assert (admission.in_flight, admission.queued) == (1, 0)
        admission.check_invariants()
        taken.release()


@pytest.mark.parametrize("limit", ["max_open_sessions", "max_client_sessions"])
async def test_no_more_sessions_are_open_than_the_limit_says(limit: str) -> None:
    flags: dict[str, Any] = {f"streaming__{limit}": 2}
    async with running_cluster(**flags) as cluster:
        for pool in (PREFILL, DECODE):
            await cluster.add(pool)
        opened = [cluster.session() for _ in range(2)]
        for session in opened:
            await session.open("hello")
        refused = cluster.session()

        error = await refused.failure()

        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert f"streaming.{limit}" in (error.details() or "")
        for session in opened:
            await session.finish()
            assert text_of(await session.answer()) == session_text("hello")
        again = cluster.session()
        await again.open("hello")
        await again.finish()
        assert text_of(await again.answer()) == session_text("hello")


async def test_sessions_whose_prompts_take_too_much_memory_are_refused_until_others_end() -> None:
    async with running_cluster(router__max_prompt_mib=1) as cluster:
        for pool in (PREFILL, DECODE):
            await cluster.add(pool)
        prompts = cluster.parts.admission.prompts
        sessions = []
        while prompts.used_bytes + 480 * TOKEN_BYTES <= prompts.limit_bytes:
            sessions.append(cluster.session())
            await sessions[-1].open("x" * 480)
        # What they have does not go by what others want.
        late = cluster.session()
        await late.open("short")
        await late.append("y" * 470)
        with pytest.raises(grpc.aio.AioRpcError, match=r"router\.max_prompt_mib") as refused:
            await late.finish()
            await late.answer()
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert retry_after_ms(refused.value) == 100
        with pytest.raises(grpc.aio.AioRpcError, match=r"router\.max_prompt_mib"):
            await cluster.generate("z" * 480)

        await sessions[0].finish()
        assert text_of(await sessions[0].answer()) == session_text("x" * 480)
        # A stand-in engine runs 32 sessions at once, whether they compute or wait.
        for session in sessions[1:]:
            session.call.cancel()
        assert text_of(await cluster.generate()) == whole_text()
        await until(lambda: prompts.used_bytes == 0)


async def test_a_message_counts_while_it_is_tokenized() -> None:
    waiting, go_on = asyncio.Event(), asyncio.Event()

    class Slow(BytesTokenizer):
        async def piece(self, piece: api.SessionPiece) -> list[int]:
            waiting.set()
            await go_on.wait()
            return await super().piece(piece)

    async with running_cluster(tokenizer=Slow) as cluster:
        for pool in (PREFILL, DECODE):
            await cluster.add(pool)
        prompts = cluster.parts.admission.prompts
        session = cluster.session()
        await session.open("hello")
        await session.append("x" * 60_000)
        await waiting.wait()
        assert prompts.used_bytes > 59_900

        go_on.set()

        await session.event("refused")
        assert prompts.used_bytes == 5 * TOKEN_BYTES
        session.call.cancel()


async def test_a_resumed_session_holds_no_slot_before_its_input_has_come_again_and_all_its_memory(
    cluster: Cluster,
) -> None:
    received = api.ReceivedAnswer(token_ids=[97] * 5, text_characters=5)
    sessions = [cluster.session() for _ in range(SLOTS)]
    for session in sessions:
        await session.open("hello", received=received)
        await session.append(" wide")
    await until(lambda: cluster.parts.admission.prompts.used_bytes == SLOTS * 15 * TOKEN_BYTES)

    assert cluster.parts.admission.in_flight == 0
    assert text_of(await cluster.generate()) == whole_text()

    for session in sessions:
        session.call.cancel()
    await until(cluster.idle)
    assert cluster.parts.admission.prompts.used_bytes == 0
