"""Streaming sessions through the whole real service: router, Ray, vLLM engines, NIXL. Each ends with all blocks back.

What a session answers is compared with `Generate` and the same prompt, whole, asked of another service: no block that
a session computed helps to answer it. Greedy and seeded answers are equal in fp32, however the prompt came.
"""

import asyncio
import functools
import random
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal

import pytest
from rachis import AsyncClient, Generated, chat_prompt, token_prompt
from rachis.prompts import piece_of
from rachis.v1 import generation_pb2 as generation

from benchmarks import identity
from builtin_model import recall
from builtin_model.vocabulary import VALUES, VOCABULARY_SIZE
from cluster_configs.loading import LoadedConfig
from command_line.own_service import Target
from control_plane.intake.tokenization import Tokenizer, document_text
from tests.fakes.session_call import SessionCall
from tests.integration.conftest import until
from tests.integration.session_play import (
    CHAT,
    FACTS,
    GREEDY,
    HANDED_OFF,
    PAGES,
    Page,
    answers_as,
    collected,
    computed,
    idle,
    pages_of,
    prompt_tokens,
    random_tokens,
    session_call,
)

pytestmark = pytest.mark.integration

SESSIONS = 40
SYSTEM = [{"role": "system", "content": "Answer from these pages.\n"}]
MODES: tuple[Literal["append", "update"], ...] = ("append", "update")
Move = tuple[str, list[int]]


@pytest.fixture(autouse=True)
async def nothing_is_left(client: AsyncClient) -> AsyncIterator[None]:
    """After every test: no block held, no lease, nothing in flight."""
    yield
    await until(functools.partial(idle, client), "nothing is left")


@pytest.fixture
def other(small: tuple[Target, AsyncClient]) -> AsyncClient:
    """The small service, as one that has seen nothing of what the shared one is asked."""
    return small[1]


@pytest.fixture
async def call(target: Target) -> AsyncIterator[SessionCall]:
    """A session of the shared service, message by message; not open yet."""
    async with session_call(target) as session:
        yield session


# The answer is that of the whole prompt.


async def test_random_sessions_answer_as_generate_does_with_the_final_prompt(
    client: AsyncClient, other: AsyncClient, loaded: LoadedConfig
) -> None:
    tokenizer = Tokenizer(loaded.config.model.resolved_path)
    await tokenizer.load()
    cases = identity.make_cases(SESSIONS, 11, VOCABULARY_SIZE, loaded.config.engine.max_model_len, tokenizer.encode)
    # Half of the prompts are in the prefix caches before their sessions come.
    await asyncio.gather(*(whole(client, case) for case in cases[::2]))
    streamed = await asyncio.gather(*(play(client, case, random.Random(case.index)) for case in cases))
    expected = await asyncio.gather(*(whole(other, case) for case in cases))

    compared = zip(cases, streamed, expected, strict=True)
    divergences = [identity.difference(*each, identity.LOGPROB_TOLERANCE) for each in compared]
    assert [each for each in divergences if each] == []
    for case, generated in zip(cases, streamed, strict=True):
        assert (generated.completion.route.handoff in HANDED_OFF) == (len(generated.token_ids) > 1), case
    records = [generated.completion.session.tokens for generated in streamed]
    assert sum(tokens.invalidated_tokens for tokens in records) > 0
    assert sum(tokens.reused_tokens for tokens in records) > 0
    # The negative control: a comparison that could not tell one seed from another would prove nothing.
    seeded = next(each for each in cases if each.sampling.get("seed") and each.sampling["max_tokens"] > 8)
    next_seed = identity.Case(0, seeded.token_ids, {**seeded.sampling, "seed": seeded.sampling["seed"] + 1})
    crossed = await play(client, next_seed, random.Random(seeded.index))
    assert identity.difference(seeded, crossed, expected[seeded.index]) is not None


@pytest.mark.parametrize("max_tokens", [1, 24])
async def test_an_answer_to_a_session_is_what_it_has_to_be(
    client: AsyncClient, other: AsyncClient, max_tokens: int
) -> None:
    kinds: list[dict[str, Any]] = [{"regex": "[a-f]{3}-[0-9]{2}"}, {"choice": ["red", "lime"]}, {"json_object": True}]
    for number, wanted in enumerate(kinds):
        prompt = prompt_tokens(40 + number, 300)
        sampling = {**GREEDY, "ignore_eos": False, "max_tokens": max_tokens}
        sampling["structured_outputs"] = generation.StructuredOutputs(**wanted)
        async with client.session(prompt[:100], **sampling) as session:
            await session.append(prompt[100:])
            answered = await collected(session)
        expected = await other.generate(token_prompt(prompt), **sampling)
        assert (answered.token_ids, answered.text) == (expected.token_ids, expected.text), wanted


async def test_one_token_is_answered_by_the_prefill_worker_alone(client: AsyncClient, other: AsyncClient) -> None:
    prompt = prompt_tokens(1, 500)
    async with client.session(prompt[:300], **{**GREEDY, "max_tokens": 1}) as session:
        await session.append(prompt[300:])
        answered = await collected(session)
    expected = await other.generate(token_prompt(prompt), **{**GREEDY, "max_tokens": 1})
    assert answered.token_ids == expected.token_ids
    route = answered.completion.route
    assert (route.prefill_worker_id, route.decode_worker_id) == ("prefill-0", "")
    assert route.handoff == generation.HANDOFF_OUTCOME_NONE


async def test_a_thousand_appends_of_one_token_answer_right(client: AsyncClient, other: AsyncClient) -> None:
    prompt = prompt_tokens(2, 1001)
    async with client.session(prompt[:1], **GREEDY) as session:
        assert await session.append_all([token] for token in prompt[1:]) == 1000
        answered = await collected(session)
    expected = await other.generate(token_prompt(prompt), **GREEDY)
    assert answered.token_ids == expected.token_ids
    tokens = answered.completion.session.tokens
    assert (tokens.inputs, tokens.received_tokens, tokens.computed_tokens) == (1000, 1001, 1001)


# The chat template around the context.


async def test_documents_between_system_text_and_question_are_answered_from(
    client: AsyncClient, other: AsyncClient
) -> None:
    question = recall.make_question(random.Random(3), 1400, fact_count=FACTS)
    async with client.session(SYSTEM, **CHAT) as session:
        assert await session.append_all(retrieved(question)) == PAGES
        await until(functools.partial(computed, session, PAGES), "all pages are computed")
        answered = await collected(session, asking(question))
    expected = await other.generate(chat_prompt(conversation(question)), **CHAT)
    assert answered.text == question.answer
    assert answered.token_ids == expected.token_ids
    assert answered.completion.usage.prompt_tokens == expected.completion.usage.prompt_tokens
    assert answered.completion.route.handoff == generation.HANDOFF_OUTCOME_PULLED
    record = answered.completion.session
    assert 0 < record.ttft_from_finish_ms < record.ttft_from_open_ms


async def test_an_update_of_a_document_changes_the_answer(client: AsyncClient, other: AsyncClient) -> None:
    stale = recall.make_question(random.Random(4), 1400, fact_count=FACTS)
    fresh = stale.with_value(stale.key, next(value for value in VALUES if value != stale.answer))
    records = []
    for last in (stale, fresh):
        async with client.session(SYSTEM, mode="update", **CHAT) as session:
            await session.append_all(retrieved(stale))
            await until(functools.partial(computed, session, PAGES), "all pages are computed")
            await session.update(pages_of(last))
            answered = await collected(session, asking(last))
        expected = await other.generate(chat_prompt(conversation(last)), **CHAT)
        assert answered.text == last.answer
        assert answered.token_ids == expected.token_ids
        records.append(answered.completion.session.tokens)
    kept, changed = records
    assert kept.invalidated_tokens == 0
    assert changed.invalidated_tokens > 0
    assert changed.reused_tokens > 0


async def test_a_revision_that_goes_back_is_refused_and_the_newer_context_stands(
    other: AsyncClient, call: SessionCall
) -> None:
    await call.open("", "UPDATE")
    await call.update(5, "the newer context")
    await call.update(4, "an older context, late")
    assert await call.refused() == ("ABORTED", "update.revision", 3)
    await call.finish(" ends")
    await answers_as(other, call, "the newer context ends")


# What the tests play and ask.


async def whole(client: AsyncClient, case: identity.Case) -> Generated:
    return await client.generate(token_prompt(case.token_ids), **case.sampling)


async def play(client: AsyncClient, case: identity.Case, rng: random.Random) -> Generated:
    """A session in either mode that ends with the prompt of the case, whatever stood there before."""
    tokens = list(case.token_ids)
    head, tail = sorted(rng.choices(range(len(tokens) + 1), k=2))
    mode = rng.choice(MODES)
    async with client.session(tokens[:head] or None, mode=mode, **case.sampling) as session:
        for number, (kind, given) in enumerate(moves_to(tokens[head:tail], mode, rng), 1):
            await getattr(session, kind)(given)
            if rng.random() < 0.5:
                await until(functools.partial(computed, session, number), "what was sent is computed")
        return await collected(session, tokens[tail:])


def moves_to(context: list[int], mode: str, rng: random.Random) -> Iterator[Move]:
    """What the client says until this is the context; in update mode it says other things before."""
    said = 0
    if mode == "update":
        for _ in range(rng.randrange(4)):
            kept = context[: rng.randint(0, len(context))]
            yield "update", kept + random_tokens(rng, rng.choice((0, 1, 40, 300)))
            if rng.random() < 0.5:
                yield "append", random_tokens(rng, rng.choice((1, 33, 200)))
        said = rng.randint(0, len(context))
        yield "update", context[:said]
    while said < len(context):
        size = rng.choice((1, 31, 32, 33, 150, 600))
        yield "append", context[said : said + size]
        said += size


async def retrieved(question: recall.RecallQuestion) -> AsyncIterator[Page]:
    for page in pages_of(question):
        yield page


def asking(question: recall.RecallQuestion) -> list[dict[str, str]]:
    return [{"role": "user", "content": question.question}]


def conversation(question: recall.RecallQuestion) -> list[dict[str, str]]:
    """The messages that a session over the question's pages comes to."""
    shown = "".join(document_text(piece_of(page).document) for page in pages_of(question))
    return [{"role": "system", "content": SYSTEM[0]["content"] + shown}, *asking(question)]
