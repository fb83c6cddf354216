"""What every engine does with a job that leaves it for another engine."""

from contextlib import aclosing

import pytest

from cluster_core.engine import Engine
from cluster_core.engine_jobs import EmittedTokens, EngineJob, EngineOutput
from tests.contract.conftest import make_job, outputs_of, text_of, tokens_of, until

LONG = 150


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
