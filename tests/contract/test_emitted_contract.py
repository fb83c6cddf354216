"""What every engine does with a request that arrives with a part of its answer, or leaves with one."""

from contextlib import aclosing

import pytest

from cluster_core.engine import Engine
from cluster_core.engine_jobs import EmittedTokens, EngineJob, EngineOutput, FinishReason
from cluster_core.engine_reports import EngineInfo
from cluster_core.errors import InvalidInputError
from tests.contract.conftest import PROMPT, make_job, outputs_of, text_of, tokens_of, until

# Of an answer that is handed over.
# An engine in a process of its own goes on while a busy machine has no turn for whoever hands its answer over.
LONG = 400


@pytest.mark.parametrize("emitted", [1, 2, 8, 23])
async def test_a_job_generates_on_from_what_has_been_emitted_without_repeating_it(
    engine: Engine, likeliest: int | None, emitted: int
) -> None:
    plain = await outputs_of(engine, make_job(24, logprobs=likeliest))
    sent = "".join(output.text for output in plain[:emitted])
    assert tokens_of(plain[:emitted]) == tokens_of(plain)[:emitted], "one output, one token"

    so_far = EmittedTokens(tuple(tokens_of(plain)[:emitted]), len(sent))
    outputs = await outputs_of(engine, make_job(24, logprobs=likeliest, emitted=so_far))

    assert tokens_of(outputs) == tokens_of(plain)[emitted:]
    assert sent + text_of(outputs) == text_of(plain)
    of_logprobs = [each.sampled.token_id for output in outputs for each in output.logprobs]
    assert of_logprobs == (tokens_of(outputs) if likeliest is not None else [])
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


async def handed_over(engine: Engine, job: EngineJob, after: int) -> list[EngineOutput]:
    """Its outputs, where it is handed over once so many have come."""
    outputs: list[EngineOutput] = []
    async with aclosing(engine.generate(job)) as stream:  # type: ignore[type-var]
        async for output in stream:
            outputs.append(output)
            if len(outputs) == after:
                assert await engine.hand_over(job.request_id) is True
                assert await engine.hand_over(job.request_id) is False, "it has ended"
    return outputs


@pytest.mark.parametrize("after", [1, 2, 17])
async def test_a_job_that_is_handed_over_ends_with_its_lease_and_goes_on_where_it_was(
    engine: Engine, after: int
) -> None:
    plain = await outputs_of(engine, make_job(LONG))
    job = make_job(LONG)

    *outputs, last = await handed_over(engine, job, after)

    assert (last.token_ids, last.text, last.finish_reason) == ((), "", None)
    assert last.lease is not None
    assert last.lease.lease_id == job.request_id
    assert all(output.lease is None for output in outputs)
    assert after <= len(tokens_of(outputs)) < LONG
    await until(engine, lambda load: load.leased_handoffs == 1)
    emitted = tuple(tokens_of(outputs))
    rest = await outputs_of(engine, make_job(LONG, emitted=EmittedTokens(emitted, len(text_of(outputs)))))
    assert [*emitted, *tokens_of(rest)] == tokens_of(plain)
    assert text_of(outputs) + text_of(rest) == text_of(plain)
    assert await engine.release(last.lease.lease_id) is True


async def test_a_job_that_has_ended_or_was_never_there_is_not_handed_over(engine: Engine) -> None:
    job = make_job(3)
    await outputs_of(engine, job)
    assert await engine.hand_over(job.request_id) is False
    assert await engine.hand_over("nobody") is False


async def test_a_caller_that_leaves_before_it_has_the_lease_leaves_none(engine: Engine) -> None:
    job = make_job(LONG)
    async with aclosing(engine.generate(job)) as stream:  # type: ignore[type-var]
        await anext(stream)
        assert await engine.hand_over(job.request_id) is True
    await until(engine, lambda load: load.leased_handoffs == 0 and load.free_blocks == load.total_blocks)
