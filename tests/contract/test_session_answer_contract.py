"""What every engine promises of a session's answer: whatever its input went through, it is that of the final prompt.

The engines are shared, so each test cleans up; `engine` checks that nothing is left.
"""

import asyncio

import pytest

from cluster_core.engine import Engine, EngineSession
from cluster_core.engine_jobs import FinishReason, SessionMode
from cluster_core.engine_reports import EngineInfo
from cluster_core.errors import InvalidInputError, OutOfOrderError, OutOfRangeError
from tests.contract.conftest import PROMPT, make_job, outputs_of, text_of, tokens_of, until
from tests.contract.session_steps import LONG, OTHER, answer, opened, settled


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


@pytest.mark.parametrize("kept", [1, 50, len(LONG) - 1])
async def test_an_update_to_a_part_of_what_is_computed_is_answered_without_more(engine: Engine, kept: int) -> None:
    async with opened(engine, LONG, SessionMode.UPDATE) as session:
        await settled(session, 0, len(LONG))
        session.update(LONG[:kept])

        await assert_answers(session, engine, LONG[:kept])


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
