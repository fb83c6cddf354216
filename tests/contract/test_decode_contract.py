"""What every decode engine owes: a report of how its batch is formed, and the batch itself when somebody asks."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace

import pytest

from cluster_core.engine import Engine
from cluster_core.engine_reports import DecodeReport
from tests.contract.conftest import make_job, outputs_of, tokens_of, until, vllm_engine
from tests.fakes.engine import FakeEngine
from worker_runtime.engine_settings import EngineRole

SHARED = tuple(token % 251 for token in range(3, 259))
OTHER = tuple(token % 241 for token in range(100, 356))


_ROLES = {"vllm": EngineRole.DECODE, "shared": EngineRole.SHARED}


@pytest.fixture(
    scope="module", params=["fake", *(pytest.param(name, marks=pytest.mark.integration) for name in _ROLES)]
)
async def decoder(request: pytest.FixtureRequest) -> AsyncIterator[Engine]:
    is_fake = request.param == "fake"
    engine = FakeEngine(forms_batches=True) if is_fake else vllm_engine(_ROLES[request.param])
    await engine.start(lambda phase: None, lambda why: None)
    yield engine
    await engine.stop()


def report_of(engine: Engine) -> DecodeReport:
    report = engine.status().decode
    assert report is not None
    return report


async def until_report(engine: Engine, holds: Callable[[DecodeReport], bool]) -> DecodeReport:
    await until(engine, lambda load: holds(report_of(engine)))
    return report_of(engine)


async def running(stack: AsyncExitStack, engine: Engine, *prompts: tuple[int, ...]) -> None:
    """Jobs that decode until the stack is left."""
    for prompt in prompts:
        outputs = await stack.enter_async_context(aclosing(engine.generate(make_job(2000, prompt=prompt))))  # type: ignore[type-var]
        await anext(outputs)


async def test_requests_that_share_a_prefix_are_one_group_of_the_batch(decoder: Engine) -> None:
    async with AsyncExitStack() as stack:
        await running(stack, decoder, *((*SHARED, number) for number in range(3)))
        report = await until_report(decoder, lambda report: report.running_requests == 3)
        batch = await decoder.decode_batch(100)

    assert 0 < report.tip_tokens <= len(SHARED)
    assert report.tip_tokens <= report.working_set_tokens <= 3 * (len(SHARED) + 1)
    [group] = [group for group in batch.groups if group.running]
    assert (group.running, group.waiting) == (3, 0)
    assert report.tip_tokens <= group.tokens <= len(SHARED)
    assert group.hash
    assert batch.waiting == ()


async def test_requests_with_nothing_in_common_share_no_tip(decoder: Engine) -> None:
    async with AsyncExitStack() as stack:
        await running(stack, decoder, SHARED, OTHER)
        report = await until_report(decoder, lambda report: report.running_requests == 2)
        groups = (await decoder.decode_batch(100)).groups
        assert len((await decoder.decode_batch(1)).groups) == 1

    assert report.tip_tokens == 0
    assert sum(group.running for group in groups) == 2


async def test_an_empty_batch_shares_nothing(decoder: Engine) -> None:
    await outputs_of(decoder, make_job(2, prompt=SHARED))

    report = await until_report(decoder, lambda report: report.running_requests == 0)

    assert (report.tip_tokens, report.working_set_tokens, report.loading_requests) == (0, 0, 0)
    assert not any(report.waiting.values())
    assert not any(group.running for group in (await decoder.decode_batch(100)).groups)


async def test_counts_grow_by_what_was_admitted_and_decoded(decoder: Engine) -> None:
    before = await until_report(decoder, lambda report: report.running_requests == 0)

    await asyncio.gather(*(outputs_of(decoder, make_job(9, prompt=(*SHARED, number))) for number in range(4)))

    admitted = sum(before.admissions.values()) + 4
    after = await until_report(decoder, lambda report: sum(report.admissions.values()) == admitted)
    assert after.steps - before.steps >= 8
    assert after.batch_sum - before.batch_sum >= after.steps - before.steps
    assert after.shared_tokens_sum > before.shared_tokens_sum
    assert after.decisions >= before.decisions
    assert after.longest_held_s >= before.longest_held_s >= 0


async def test_the_batch_in_force_has_a_name_and_a_known_mode(decoder: Engine) -> None:
    report = report_of(decoder)

    assert report.policy
    assert report.mode in ("policy", "probe", "fallback")
    assert set(report.waiting) <= {"capacity", "held", "prefix", "share"}
    assert set(report.wait_s) <= {"capacity", "held", "prefix", "share"}


async def test_a_job_with_a_priority_and_a_deadline_is_answered_as_any_other(decoder: Engine) -> None:
    plain, urgent = make_job(5, prompt=SHARED), make_job(5, prompt=SHARED)

    answers = [
        await outputs_of(decoder, plain),
        await outputs_of(decoder, replace(urgent, priority=-1000, deadline_s=30.0)),
    ]

    assert tokens_of(answers[0]) == tokens_of(answers[1])
