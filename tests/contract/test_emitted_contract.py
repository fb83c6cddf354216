"""What every engine does with a request that arrives with a part of its answer."""

import pytest

from cluster_core.engine import Engine
from cluster_core.engine_jobs import EmittedTokens, FinishReason
from cluster_core.engine_reports import EngineInfo
from cluster_core.errors import InvalidInputError
from tests.contract.conftest import PROMPT, make_job, outputs_of, text_of, tokens_of


@pytest.mark.parametrize("emitted", [1, 2, 8, 23])
async def test_a_job_generates_on_from_what_has_been_emitted_without_repeating_it(engine: Engine, emitted: int) -> None:
    plain = await outputs_of(engine, make_job(24, logprobs=2))
    sent = "".join(output.text for output in plain[:emitted])
    assert tokens_of(plain[:emitted]) == tokens_of(plain)[:emitted], "one output, one token"

    so_far = EmittedTokens(tuple(tokens_of(plain)[:emitted]), len(sent))
    outputs = await outputs_of(engine, make_job(24, logprobs=2, emitted=so_far))

    assert tokens_of(outputs) == tokens_of(plain)[emitted:]
    assert sent + text_of(outputs) == text_of(plain)
    assert [each.sampled.token_id for output in outputs for each in output.logprobs] == tokens_of(outputs)
    assert outputs[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("emitted", [1, 5])
async def test_what_was_emitted_and_not_shown_comes_with_the_text(engine: Engine, emitted: int) -> None:
    plain = await outputs_of(engine, make_job(9))

    outputs = await outputs_of(engine, make_job(9, emitted=EmittedTokens(tuple(tokens_of(plain)[:emitted]), 0)))

    assert text_of(outputs) == text_of(plain)


@pytest.mark.parametrize("emitted", [1, 2, 3, 4, 5])
async def test_a_stop_string_that_began_in_what_was_emitted_ends_the_job(engine: Engine, emitted: int) -> None:
    whole = await outputs_of(engine, make_job(9))
    stop = text_of(whole)[3:7]
    plain = await outputs_of(engine, make_job(9, stop=(stop,)))
    shown = min(emitted, max(0, len(text_of(plain))))

    so_far = EmittedTokens(tuple(tokens_of(plain)[:emitted]), shown)
    outputs = await outputs_of(engine, make_job(9, stop=(stop,), emitted=so_far))

    assert tokens_of(outputs) == tokens_of(plain)[emitted:]
    assert text_of(plain)[:shown] + text_of(outputs) == text_of(plain)
    assert outputs[-1].finish_reason is FinishReason.STOP


async def test_an_answer_that_has_ended_with_what_was_emitted_is_refused(engine: Engine) -> None:
    plain = await outputs_of(engine, make_job(3))

    with pytest.raises(InvalidInputError, match="emitted"):
        await outputs_of(engine, make_job(3, emitted=EmittedTokens(tuple(tokens_of(plain)), 0)))

    assert tokens_of(await outputs_of(engine, make_job(3))) == tokens_of(plain)


async def test_what_was_emitted_beyond_the_models_length_is_refused(
    started: tuple[Engine, EngineInfo], engine: Engine
) -> None:
    room = started[1].max_model_len - len(PROMPT)

    with pytest.raises(InvalidInputError, match=r"emitted|request"):
        await outputs_of(engine, make_job(room + 9, emitted=EmittedTokens((97,) * room, 0)))

    assert len(tokens_of(await outputs_of(engine, make_job(3)))) == 3


async def test_what_was_emitted_and_is_no_token_of_the_model_is_refused(
    started: tuple[Engine, EngineInfo], engine: Engine
) -> None:
    with pytest.raises(InvalidInputError, match="emitted"):
        await outputs_of(engine, make_job(9, emitted=EmittedTokens((97, started[1].vocabulary_size), 0)))

    assert len(tokens_of(await outputs_of(engine, make_job(3)))) == 3


async def test_a_prompt_and_what_was_emitted_are_handed_off_together(engine: Engine) -> None:
    plain = await outputs_of(engine, make_job(9))
    so_far = EmittedTokens(tuple(tokens_of(plain)[:4]), 0)

    outputs = await outputs_of(engine, make_job(5, emitted=so_far, hand_off=True))
    lease = outputs[-1].lease

    assert tokens_of(outputs) == tokens_of(plain)[4:5]
    assert lease is not None
    assert await engine.release(lease.lease_id) is True
