"""What tests of streaming sessions send, and what they compare with."""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from rachis import AsyncClient, AsyncSession, Generated, text_prompt
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import router_pb2_grpc

from builtin_model import recall
from builtin_model.vocabulary import VOCABULARY_SIZE
from command_line.own_service import Target
from tests.fakes.answers import text_of, tokens_of
from tests.fakes.session_call import SessionCall
from tests.integration import secured
from tests.integration.conftest import all_blocks_free

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
CHAT: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8}
HANDED_OFF = (generation.HANDOFF_OUTCOME_PULLED, generation.HANDOFF_OUTCOME_LOCAL)
PAGES = 6
FACTS = 20


@dataclass(frozen=True, slots=True)
class Page:
    """What a retriever finds, in the shape of LangChain's documents."""

    page_content: str
    metadata: dict[str, str] = field(default_factory=dict)


async def collected(session: AsyncSession, closing: Any = None) -> Generated:
    """The session's answer, whole."""
    generated = Generated()
    async for delta in session.finish(closing or None):
        generated.add(delta)
    generated.completion = session.completion
    return generated


async def computed(session: AsyncSession, inputs: int) -> bool:
    """So many inputs are taken in and computed, all but the last token, which waits for the next."""
    progress = session.progress
    return progress.inputs == inputs and progress.ready_tokens + 1 >= progress.prompt_tokens


def prompt_tokens(seed: int, count: int) -> list[int]:
    return random_tokens(random.Random(seed), count)


def random_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCABULARY_SIZE) for _ in range(count)]


def pages_of(question: recall.RecallQuestion) -> list[Page]:
    stated = [filler + fact.text for filler, fact in zip(question.fillers, question.facts, strict=False)]
    stated.append(question.fillers[-1])
    cuts = [index * len(stated) // PAGES for index in range(PAGES + 1)]
    texts = ["".join(stated[start:end]) for start, end in pairwise(cuts)]
    return [Page(text, {"title": f"Page {number}"}) for number, text in enumerate(texts, 1)]


@asynccontextmanager
async def session_call(target: Target) -> AsyncIterator[SessionCall]:
    async with secured.channel(target.address) as channel:
        method: Any = router_pb2_grpc.RouterServiceStub(channel).StreamGenerate
        yield SessionCall(method(timeout=60))


async def answers_as(other: AsyncClient, session: SessionCall, text: str) -> None:
    answer = await session.answer()
    expected = await other.generate(text_prompt(text), **CHAT)
    assert tokens_of(answer) == expected.token_ids
    assert text_of(answer) == expected.text


async def idle(client: AsyncClient) -> bool:
    """All blocks are free, nothing is leased, and the router has no request."""
    status = await client.router_status()
    return not (status.in_flight_requests or status.queued_requests) and await all_blocks_free(client)
