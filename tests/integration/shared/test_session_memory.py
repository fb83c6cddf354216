"""Streaming sessions that want more blocks than there are, and clients that are faster than prefill."""

import asyncio
import functools
import random

import pytest
from rachis import AsyncClient, AsyncSession, Generated, text_prompt, token_prompt
from rachis.conventions import next_message
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import router_pb2 as api

from builtin_model import recall
from command_line.own_service import Target
from tests.fakes.answers import delta_of
from tests.fakes.session_call import SessionCall
from tests.integration.conftest import until
from tests.integration.session_play import (
    FACTS,
    GREEDY,
    collected,
    computed,
    idle,
    pages_of,
    prompt_tokens,
    session_call,
)
from tests.integration.shared.conftest import MAX_BACKLOG_TOKENS

pytestmark = pytest.mark.integration

PIECE_TOKENS = 50
CROWD = 24


async def test_sessions_that_do_not_fit_are_preempted_by_both_kinds_and_answer_right(
    client: AsyncClient, small: tuple[Target, AsyncClient]
) -> None:
    _, crowded = small
    rng = random.Random(9)
    questions = [recall.make_question(rng, rng.randint(400, 900), FACTS) for _ in range(CROWD)]
    others = [recall.make_question(rng, 600, FACTS) for _ in range(CROWD // 4)]
    answers, _ = await asyncio.gather(
        asyncio.gather(*(asked(crowded, question) for question in questions)),
        asyncio.gather(*(given_up(crowded, question) for question in others)),
    )
    await until(functools.partial(idle, crowded), "nothing is left")
    records = [answered.completion.session for answered in answers]
    assert sum(record.preemptions_swap for record in records) > 0
    assert sum(record.preemptions_recompute for record in records) > 0
    for question, answered in zip(questions, answers, strict=True):
        expected = await client.generate(text_prompt(question.text), **GREEDY)
        assert answered.text.startswith(question.answer)
        assert answered.token_ids == expected.token_ids


async def test_a_client_faster_than_prefill_is_slowed_at_the_backlog_limit(
    target: Target, client: AsyncClient, small: tuple[Target, AsyncClient]
) -> None:
    prompt = prompt_tokens(7, 3500)
    lead, answer = await sent_at_once(small[0], prompt)
    # The negative control: where the limit is far away the same client is far ahead.
    free_lead, free_answer = await sent_at_once(target, prompt)
    expected = await client.generate(token_prompt(prompt), **GREEDY)
    assert answer == free_answer == expected.token_ids
    assert 0 < lead <= MAX_BACKLOG_TOKENS + PIECE_TOKENS
    assert free_lead > MAX_BACKLOG_TOKENS + PIECE_TOKENS
    await until(functools.partial(idle, small[1]), "nothing is left")


async def asked(client: AsyncClient, question: recall.RecallQuestion) -> Generated:
    async with client.session(**GREEDY) as session:
        await send_pages(session, question)
        return await collected(session, question.question)


async def given_up(client: AsyncClient, question: recall.RecallQuestion) -> None:
    """The client leaves when all pages are computed."""
    async with client.session(**GREEDY) as session:
        await send_pages(session, question)


async def send_pages(session: AsyncSession, question: recall.RecallQuestion) -> None:
    """One by one, each when the ones before are computed."""
    for number, page in enumerate(pages_of(question), 1):
        await session.append(page.page_content)
        await until(functools.partial(computed, session, number), "the page is computed")


async def sent_at_once(target: Target, prompt: list[int]) -> tuple[int, list[int]]:
    """How far the tokens received were ahead of those computed at most, and the answer."""

    async def send(session: SessionCall) -> None:
        for at in range(0, len(prompt), PIECE_TOKENS):
            piece = api.SessionPiece(token_ids=generation.TokenIds(ids=prompt[at : at + PIECE_TOKENS]))
            await session.send(append=api.SessionAppend(piece=piece))
        await session.finish()

    lead = 0
    answer: list[int] = []
    async with session_call(target) as session, asyncio.TaskGroup() as tasks:
        await session.open(None, ignore_eos=True)
        tasks.create_task(send(session))
        while (response := await next_message(session.call)) is not None:
            if response.HasField("progress"):
                lead = max(lead, response.progress.received_tokens - response.progress.ready_tokens)
            answer += delta_of(response).token_ids
    return lead, answer
