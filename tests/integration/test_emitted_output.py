"""Answers that are cut anywhere and go on in a real engine are, to the last log-probability, those of one go.

Sampling of every kind, several at once in one batch, greedy and seeded, fp32. What each part of it is for: the bugs
that are planted.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from itertools import count
from random import Random
from typing import Any

import pytest
import pytest_asyncio

from cluster_core.engine import Engine
from cluster_core.engine_jobs import EmittedTokens, EngineJob, EngineOutput, SamplingSpec, StructuredOutputs
from cluster_core.errors import InvalidInputError
from tests.contract.conftest import outputs_of, text_of, tokens_of, vllm_engine
from tests.integration.planted_output import PLANTED, PLANTED_IN_ROWS, rows_without_output
from tests.structured.cases import byte_ids
from worker_runtime.engine_settings import EngineRole
from worker_runtime.vllm_engine import VllmEngine

pytestmark = pytest.mark.integration

TRIALS = 60
AT_ONCE = 6
LONGEST = 40
_names = count()


@pytest_asyncio.fixture(scope="module")
async def engine() -> AsyncIterator[VllmEngine]:
    engine = vllm_engine(EngineRole.DECODE)
    await engine.start(lambda phase: None, lambda why: None)
    yield engine
    await engine.stop()


@dataclass(frozen=True, slots=True)
class Trial:
    """A job, and how many outputs come before the cut, as a share of all."""

    job: EngineJob
    cut_at: float


def drawn(rng: Random) -> Trial:
    sampling = SamplingSpec(
        max_tokens=rng.randint(2, LONGEST),
        temperature=rng.choice((0.0, 0.7, 1.0, 1.6)),
        top_p=rng.choice((1.0, 0.9)),
        top_k=rng.choice((0, 0, 20)),
        min_p=rng.choice((0.0, 0.05)),
        seed=rng.randrange(1000),
        stop=rng.choice(((), (), ("e",), ("the", " a"), ("zzzz",))),
        stop_token_ids=rng.choice(((), (), (101, 32))),
        presence_penalty=rng.choice((0.0, 1.5)),
        frequency_penalty=rng.choice((0.0, 0.8)),
        repetition_penalty=rng.choice((1.0, 1.3)),
        logprobs=rng.choice((None, None, 3)),
        min_tokens=rng.choice((0, 0, 12)),
        ignore_eos=rng.random() < 0.7,
        logit_bias=rng.choice(({}, {}, {101: -4.0, 32: 1.5})),
        allowed_token_ids=rng.choice(((), (), (), tuple(range(32, 110)))),
        bad_words=rng.choice(((), (), ("e", "th"), (" a",))),
    )
    sampling = replace(sampling, min_tokens=min(sampling.min_tokens, sampling.max_tokens))
    if rng.random() < 1 / 3:
        # Whatever else forbids tokens may leave none that a grammar takes.
        free: dict[str, Any] = {"min_tokens": 0, "allowed_token_ids": (), "bad_words": (), "logit_bias": {}}
        sampling = replace(sampling, structured_outputs=drawn_structure(rng), **free)
    prompt = tuple(rng.choice(b"the capital of France ") for _ in range(rng.randint(1, 120)))
    return Trial(EngineJob("", prompt, sampling), rng.random())


def drawn_structure(rng: Random) -> StructuredOutputs:
    """Of every kind, of some length."""
    fields = {
        f"f{number}": {"type": rng.choice(("integer", "boolean", "string"))} for number in range(rng.randint(1, 4))
    }
    schema = {"type": "object", "properties": fields, "required": sorted(fields), "additionalProperties": False}
    low = rng.randint(1, 20)
    return rng.choice((
        StructuredOutputs(json=json.dumps(schema)),
        StructuredOutputs(json_object=True),
        StructuredOutputs(regex=f"[a-f]{{{low},{low + 10}}}( [0-9]{{2}})*"),
        StructuredOutputs(choice=tuple("the capital of France"[: rng.randint(1, 21)] + str(each) for each in range(4))),
        StructuredOutputs(grammar='root ::= pair ("," pair)*\npair ::= [a-z]+ "=" [0-9]+'),
    ))  # fmt: skip


async def differences(engine: Engine, trials: list[Trial]) -> list[str]:
    """Of answers that were cut from those of one go, in words. Several run at once, and others beside them."""
    places = asyncio.Semaphore(AT_ONCE)

    async def tried(trial: Trial) -> str:
        async with places:
            return await _difference(engine, trial)

    return [found for found in await asyncio.gather(*map(tried, trials)) if found]


async def is_wrong(engine: Engine, trials: list[Trial]) -> bool:
    """Whether there is a difference; trials after it are not tried."""
    for first in range(0, len(trials), AT_ONCE):
        if await differences(engine, trials[first : first + AT_ONCE]):
            return True
    return False


async def _difference(engine: Engine, trial: Trial) -> str:
    whole = await _run(engine, trial.job)
    cut = int(trial.cut_at * len(whole))
    if not cut:
        return ""
    head, emitted = whole[:cut], tokens_of(whole[:cut])
    so_far = EmittedTokens(tuple(emitted), len(text_of(head)))
    went_on = [*head, *await _run(engine, replace(trial.job, emitted=so_far))]
    for part in (tokens_of, text_of, _logprobs, _reason):
        one, other = part(whole), part(went_on)
        if one != other:
            return f"{part.__name__} after {len(emitted)} tokens: {other} instead of {one}, {trial.job.sampling}"
    return ""


async def _run(engine: Engine, job: EngineJob) -> list[EngineOutput]:
    return await outputs_of(engine, replace(job, request_id=f"emitted-{next(_names)}"))


def _logprobs(outputs: list[EngineOutput]) -> list[Any]:
    """Values to the third digit: what is computed in one go adds up in another order."""
    rows = [row for output in outputs for row in output.logprobs]
    return [[(each.token_id, each.rank) for each in (row.sampled, *row.top)] for row in rows] + [
        round(row.sampled.logprob, 3) for row in rows
    ]


def _reason(outputs: list[EngineOutput]) -> object:
    return outputs[-1].finish_reason


async def test_an_answer_that_goes_on_is_that_of_one_go(engine: Engine) -> None:
    rng = Random(16_384)
    assert await differences(engine, [drawn(rng) for _ in range(TRIALS)]) == []


@pytest.mark.parametrize("planted", PLANTED)
async def test_a_planted_bug_is_found(engine: VllmEngine, planted: Any) -> None:
    config = await engine.look(lambda work: work.engine.vllm_config)
    if planted in PLANTED_IN_ROWS and config.use_v2_model_runner:
        pytest.skip("V2 of vLLM's model runners keeps no such rows")
    if planted is rows_without_output and config.scheduler_config.async_scheduling:
        pytest.skip("an engine that steps ahead dies of it, and is that of all tests here")
    rng = Random(16_384)
    with planted():
        assert await is_wrong(engine, [drawn(rng) for _ in range(TRIALS)])


async def test_output_that_the_grammar_does_not_take_is_refused_by_its_field(engine: Engine) -> None:
    sampling = SamplingSpec(max_tokens=8, temperature=0.0, structured_outputs=StructuredOutputs(regex="[a-f]{6}"))
    job = EngineJob("", byte_ids("the capital"), sampling, emitted=EmittedTokens(byte_ids("abz"), 3))
    with pytest.raises(InvalidInputError, match="emitted"):
        await _run(engine, job)
    went_on = await _run(engine, replace(job, emitted=EmittedTokens(byte_ids("abc"), 3)))
    assert re.fullmatch("[a-f]{3}", text_of(went_on))


async def test_a_grammar_that_nothing_can_follow_ends_its_request_alone(engine: Engine) -> None:
    sampling = SamplingSpec(
        max_tokens=8,
        temperature=0.0,
        structured_outputs=StructuredOutputs(regex="[a-f]{6}"),
        allowed_token_ids=byte_ids("xyz"),
    )
    job = EngineJob("", byte_ids("the capital"), sampling)
    free = replace(job, sampling=replace(sampling, allowed_token_ids=()))
    outcomes = await asyncio.gather(_run(engine, job), _run(engine, free), return_exceptions=True)
    assert isinstance(outcomes[0], InvalidInputError) and outcomes[0].field == "sampling.structured_outputs"
    assert isinstance(outcomes[1], list) and re.fullmatch("[a-f]{6}", text_of(outcomes[1]))
