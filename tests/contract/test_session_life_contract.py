"""What every engine promises of a session beside its answer: what it tells as it goes on, and how it ends.

The engines are shared, so each test cleans up; `engine` checks that nothing is left.
"""

import asyncio
from contextlib import AsyncExitStack, aclosing

import pytest

from cluster_core.engine import Engine, EngineSession
from cluster_core.engine_jobs import SessionEventKind, SessionMode, SessionProgress
from cluster_core.engine_reports import EngineInfo
from cluster_core.errors import UnavailableError
from tests.contract.conftest import PROMPT, is_idle, make_job, outputs_of, tokens_of, until
from tests.contract.session_steps import LONG, OTHER, answer, opened, settled
from tests.fakes.engine import FakeEngine

# Progress.


async def test_progress_counts_what_came_in_and_what_was_computed_of_it(engine: Engine) -> None:
    async with opened(engine, LONG[:40]) as session:
        session.append(LONG[40:100])
        session.append(LONG[100:150])
        progress = await settled(session, 2, 150)

        assert progress.received_tokens == 150
        assert progress.invalidated_tokens == 0
        assert progress.computed_tokens + progress.reused_tokens == progress.ready_tokens


async def test_nothing_is_computed_beyond_the_prompt_and_progress_grows_only(engine: Engine) -> None:
    async with opened(engine, LONG) as session:
        seen = [session.progress()]
        while seen[-1].ready_tokens < len(LONG) - 1:
            seen.append(await session.changed())

        ready = [progress.ready_tokens for progress in seen]
        assert ready == sorted(ready)
        assert all(progress.ready_tokens <= progress.prompt_tokens == len(LONG) for progress in seen)


async def test_an_update_invalidates_only_what_follows_the_common_prefix(
    started: tuple[Engine, EngineInfo], engine: Engine
) -> None:
    """Up to a block more, where the engine keeps whole blocks only."""
    async with opened(engine, LONG, SessionMode.UPDATE) as session:
        before = await settled(session, 0, len(LONG))
        session.update(LONG[:200] + OTHER)
        after = await settled(session, 1, 200 + len(OTHER))

        lost = before.ready_tokens - 200
        assert lost <= after.invalidated_tokens <= lost + started[1].block_size_tokens
        assert after.reused_tokens >= before.ready_tokens - after.invalidated_tokens
        assert after.received_tokens == len(LONG) + 200 + len(OTHER)


async def test_an_update_to_the_same_prompt_invalidates_nothing(engine: Engine) -> None:
    async with opened(engine, LONG, SessionMode.UPDATE) as session:
        before = await settled(session, 0, len(LONG))
        session.update(LONG)
        after = await settled(session, 1, len(LONG))

        assert (after.invalidated_tokens, after.computed_tokens) == (0, before.computed_tokens)


async def test_every_append_and_update_is_counted_as_one_input_and_finish_as_none(engine: Engine) -> None:
    async with opened(engine, (), SessionMode.UPDATE) as session:
        session.append(PROMPT)
        session.update(OTHER)
        session.append(PROMPT[:1])
        await settled(session, 3, len(OTHER) + 1)

        outputs = await answer(session, PROMPT)

        record = outputs[-1].session
        assert record is not None
        assert record.tokens.inputs == 3


async def test_changed_waits_until_there_is_something_to_tell(engine: Engine) -> None:
    async with opened(engine, PROMPT) as session:
        told = await settled(session, 0, len(PROMPT))
        waiting = asyncio.create_task(_other_than(session, told))
        for _ in range(3):
            await engine.release("nothing")
        assert not waiting.done()

        session.append(OTHER)

        assert (await waiting).inputs <= 1


async def _other_than(session: EngineSession, told: SessionProgress) -> SessionProgress:
    while (progress := await session.changed()) == told:
        pass
    return progress


async def test_the_record_comes_with_the_last_output_and_ends_with_finished(engine: Engine) -> None:
    async with opened(engine, PROMPT) as session:
        outputs = await answer(session)

    assert [output.session is None for output in outputs] == [True] * (len(outputs) - 1) + [False]
    record = outputs[-1].session
    assert record is not None
    assert record.tokens.prompt_tokens == record.tokens.ready_tokens == len(PROMPT)
    assert (record.preemptions_swap, record.preemptions_recompute) == (0, 0)
    kinds = [event.kind for event in record.events]
    assert (kinds[0], kinds[-1]) == (SessionEventKind.QUEUED, SessionEventKind.FINISHED)
    times = [event.at_s for event in record.events]
    assert times == sorted(times)


async def test_no_token_is_sampled_before_finish(engine: Engine) -> None:
    generated = engine.status().counters.generated_tokens
    async with opened(engine, PROMPT) as session:
        session.append(OTHER)
        await settled(session, 1, len(PROMPT + OTHER))

    await until(engine, is_idle)
    assert engine.status().counters.generated_tokens == generated


# The end.


@pytest.mark.parametrize("waits", [False, True], ids=["at once", "when computed"])
async def test_closing_frees_what_the_session_held(engine: Engine, waits: bool) -> None:
    async with opened(engine, LONG) as session:
        if waits:
            await settled(session, 0, len(LONG))
            await until(engine, lambda load: load.free_blocks < load.total_blocks)

    await until(engine, is_idle)


async def test_closing_twice_or_after_the_end_is_harmless(engine: Engine) -> None:
    async with opened(engine, PROMPT) as session:
        await answer(session)
        session.close()
        session.close()

    assert len(tokens_of(await outputs_of(engine, make_job(3)))) == 3


async def test_closing_while_the_answer_is_generated_frees_what_the_session_held(engine: Engine) -> None:
    async with (
        opened(engine, PROMPT, max_tokens=2000) as session,
        aclosing(session.finish()) as outputs,  # type: ignore[type-var]
    ):
        await anext(outputs)

    await until(engine, is_idle)


async def test_changed_of_a_closed_session_is_unavailable(engine: Engine) -> None:
    async with opened(engine, PROMPT) as session:
        await settled(session, 0, len(PROMPT))
        waiting = asyncio.create_task(_until_it_raises(session))
        await asyncio.sleep(0)
        session.close()

        with pytest.raises(UnavailableError):
            await waiting


async def _until_it_raises(session: EngineSession) -> None:
    while True:
        await session.changed()


async def test_release_under_the_name_of_an_open_session_ends_it(engine: Engine) -> None:
    job = make_job(1, prompt=PROMPT, hand_off=True)
    session = engine.open_session(job, SessionMode.APPEND)
    try:
        await settled(session, 0, len(PROMPT))

        assert await engine.release(job.request_id) is True

        with pytest.raises(UnavailableError):
            await _until_it_raises(session)
    finally:
        session.close()


async def test_the_death_of_the_engine_ends_a_session_as_unavailable() -> None:
    """Of the fake alone: the shared engine has to live on."""
    engine = FakeEngine()
    async with opened(engine, PROMPT) as session, opened(engine, PROMPT) as finished:
        engine.hold_before(0)
        reading = asyncio.create_task(answer(finished))
        await engine.held.wait()

        engine.die("of a test")

        with pytest.raises(UnavailableError, match="of a test"):
            await _until_it_raises(session)
        with pytest.raises(UnavailableError, match="of a test"):
            await reading


async def test_a_request_is_computed_beside_more_idle_sessions_than_a_step_has_places(
    started: tuple[Engine, EngineInfo], engine: Engine
) -> None:
    """A session that waits for its client keeps nobody else waiting."""
    async with AsyncExitStack() as sessions, asyncio.timeout(120):
        for _ in range(started[1].max_running_requests + 1):
            session = await sessions.enter_async_context(opened(engine, PROMPT[:8]))
            await settled(session, 0, 8)
        assert len(tokens_of(await outputs_of(engine, make_job(4)))) == 4
