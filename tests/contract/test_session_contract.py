"""What every engine promises of a session: whatever its input went through, the answer is that of the final prompt.

The engines are shared, so each test cleans up; `engine` checks that nothing is left.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest

from cluster_core.engine import Engine, EngineSession
from cluster_core.engine_jobs import EngineOutput, FinishReason, SessionEventKind, SessionMode, SessionProgress
from cluster_core.engine_reports import EngineInfo
from cluster_core.errors import InvalidInputError, OutOfOrderError, OutOfRangeError, UnavailableError
from tests.contract.conftest import PROMPT, is_idle, make_job, outputs_of, text_of, tokens_of, until
from tests.fakes.engine import FakeEngine

LONG = PROMPT * 4
OTHER = tuple(b"Another document altogether, of which nothing was ever said before. ")


@asynccontextmanager
async def opened(
    engine: Engine,
    prompt: tuple[int, ...] = (),
    mode: SessionMode = SessionMode.APPEND,
    *,
    max_tokens: int = 8,
    hand_off: bool = False,
) -> AsyncIterator[EngineSession]:
    session = engine.open_session(make_job(max_tokens, prompt=prompt, hand_off=hand_off), mode)
    try:
        yield session
    finally:
        session.close()


async def settled(session: EngineSession, inputs: int, prompt_tokens: int) -> SessionProgress:
    """Once so many inputs are taken in and all but the last token is computed."""

    def holds(progress: SessionProgress) -> bool:
        taken_in = (progress.inputs, progress.prompt_tokens) == (inputs, prompt_tokens)
        return taken_in and progress.ready_tokens >= prompt_tokens - 1

    async with asyncio.timeout(20):
        while not holds(session.progress()):
            await session.changed()
    return session.progress()


async def answer(session: EngineSession, last: tuple[int, ...] = ()) -> list[EngineOutput]:
    return [output async for output in session.finish(last)]


async def assert_answers(
    session: EngineSession, engine: Engine, prompt: tuple[int, ...], last: tuple[int, ...] = ()
) -> None:
    """Finishing gives what a fresh job with that prompt gives."""
    outputs = await answer(session, last)
    fresh = await outputs_of(engine, make_job(8, prompt=prompt))

    assert tokens_of(outputs) == tokens_of(fresh)
    assert text_of(outputs) == text_of(fresh)
    assert [output.finish_reason for output in outputs if output.finish_reason] == [FinishReason.LENGTH]


# The answer.


@pytest.mark.parametrize("waits", [False, True], ids=["at once", "step by step"])
@pytest.mark.parametrize("size", [7, 64])
async def test_appended_pieces_give_the_answer_of_the_whole_prompt(engine: Engine, size: int, waits: bool) -> None:
    async with opened(engine, LONG[:size]) as session:
        for number, start in enumerate(range(size, len(LONG), size), 1):
            piece = LONG[start : start + size]
            session.append(piece)
            if waits:
                await settled(session, number, start + len(piece))

        await assert_answers(session, engine, LONG)


async def test_hundreds_of_appends_of_one_token_give_the_answer_of_the_whole_prompt(engine: Engine) -> None:
    async with opened(engine) as session:
        for token in LONG:
            session.append((token,))

        await assert_answers(session, engine, LONG)


async def test_a_session_that_is_opened_with_its_whole_prompt_answers_as_a_job(engine: Engine) -> None:
    async with opened(engine, PROMPT) as session:
        await assert_answers(session, engine, PROMPT)


async def test_the_last_tokens_may_come_with_finish(engine: Engine) -> None:
    async with opened(engine, PROMPT[:30]) as session:
        await settled(session, 0, 30)

        await assert_answers(session, engine, PROMPT, PROMPT[30:])


async def test_a_session_may_get_all_its_prompt_with_finish(engine: Engine) -> None:
    async with opened(engine) as session:
        await assert_answers(session, engine, PROMPT, PROMPT)


@pytest.mark.parametrize("waits", [False, True], ids=["at once", "step by step"])
@pytest.mark.parametrize(
    "replacement",
    [
        PROMPT[:40] + OTHER,
        OTHER,
        OTHER[:3],
        LONG[:50],
        LONG[:-1],
        LONG,
        LONG + OTHER,
        (),
    ],
    ids=["common start", "nothing common", "short", "shortened", "one less", "same", "longer", "empty"],
)
async def test_an_update_gives_the_answer_of_the_new_prompt(
    engine: Engine, replacement: tuple[int, ...], waits: bool
) -> None:
    async with opened(engine, LONG, SessionMode.UPDATE) as session:
        if waits:
            await settled(session, 0, len(LONG))
        session.update(replacement)
        if waits:
            await settled(session, 1, len(replacement))

        await assert_answers(session, engine, replacement + PROMPT[-9:], PROMPT[-9:])


async def test_updates_and_appends_in_turn_give_the_answer_of_what_is_left(engine: Engine) -> None:
    async with opened(engine, PROMPT[:20], SessionMode.UPDATE) as session:
        session.append(OTHER)
        session.update(PROMPT[:20] + OTHER[:5] + PROMPT)
        await session.changed()
        session.append(OTHER[:7])
        session.update(PROMPT[:60])
        session.append(PROMPT[60:])

        await assert_answers(session, engine, PROMPT)


async def test_sessions_that_run_together_answer_as_alone(engine: Engine) -> None:
    async def one(prompt: tuple[int, ...]) -> None:
        async with opened(engine, prompt[:10]) as session:
            for start in range(10, len(prompt), 16):
                session.append(prompt[start : start + 16])
                await asyncio.sleep(0)
            await assert_answers(session, engine, prompt)

    await asyncio.gather(one(LONG), one(OTHER), one(PROMPT))


async def test_a_hand_off_session_ends_with_a_lease_that_can_be_released(engine: Engine) -> None:
    async with opened(engine, PROMPT[:30], max_tokens=1, hand_off=True) as session:
        lease = (await answer(session, PROMPT[30:]))[-1].lease

    assert lease is not None
    await until(engine, lambda load: load.leased_handoffs == 1)
    assert await engine.release(lease.lease_id) is True


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


# Bad input: nothing changes, the session goes on.


async def test_an_append_beyond_the_models_length_changes_nothing(
    started: tuple[Engine, EngineInfo], engine: Engine
) -> None:
    async with opened(engine, PROMPT[:30]) as session:
        with pytest.raises(OutOfRangeError):
            session.append((97,) * started[1].max_model_len)

        session.append(PROMPT[30:])
        await assert_answers(session, engine, PROMPT)


async def test_an_update_beyond_the_models_length_changes_nothing(
    started: tuple[Engine, EngineInfo], engine: Engine
) -> None:
    async with opened(engine, PROMPT, SessionMode.UPDATE) as session:
        with pytest.raises(OutOfRangeError):
            session.update((97,) * (started[1].max_model_len + 1))

        await assert_answers(session, engine, PROMPT)


async def test_a_finish_beyond_the_models_length_changes_nothing(
    started: tuple[Engine, EngineInfo], engine: Engine
) -> None:
    async with opened(engine, PROMPT[:30]) as session:
        with pytest.raises(OutOfRangeError):
            session.finish((97,) * started[1].max_model_len)

        session.append(PROMPT[30:40])
        await assert_answers(session, engine, PROMPT, PROMPT[40:])


async def test_an_empty_prompt_cannot_be_finished_and_the_session_goes_on(engine: Engine) -> None:
    async with opened(engine) as session:
        with pytest.raises(InvalidInputError):
            session.finish()

        session.append(PROMPT)
        await assert_answers(session, engine, PROMPT)


async def test_an_update_to_nothing_cannot_be_finished_and_the_session_goes_on(engine: Engine) -> None:
    async with opened(engine, PROMPT, SessionMode.UPDATE) as session:
        session.update(())
        with pytest.raises(InvalidInputError):
            session.finish()

        session.update(OTHER)
        await assert_answers(session, engine, OTHER)


@pytest.mark.parametrize("call", ["append", "update", "finish"])
async def test_input_after_finish_is_refused_and_the_answer_goes_on(engine: Engine, call: str) -> None:
    async with opened(engine, PROMPT, SessionMode.UPDATE) as session:
        outputs = session.finish()
        with pytest.raises(OutOfOrderError):
            getattr(session, call)(OTHER)

        collected = [output async for output in outputs]
        assert tokens_of(collected) == tokens_of(await outputs_of(engine, make_job(8, prompt=PROMPT)))


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
