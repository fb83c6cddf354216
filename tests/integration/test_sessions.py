"""Streaming sessions through the whole real service: router, Ray, vLLM engines, NIXL. Each ends with all blocks back.

What a session answers is compared with `Generate` and the same prompt, whole, asked of another service: no block that
a session computed helps to answer it. Greedy and seeded answers are equal in fp32, however the prompt came.
"""

import asyncio
import functools
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import grpc
import pytest
import pytest_asyncio
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import router_pb2 as api
from rachis.v1 import router_pb2_grpc
from rachis.v1 import worker_pb2 as wire
from rachis.wire import next_message

from benchmarks import identity
from builtin_model import recall
from builtin_model.vocabulary import VALUES, VOCABULARY_SIZE
from cluster_configs.loading import LoadedConfig
from command_line.own_service import Target
from control_plane.client import ClientSession, Generated, RachisClient, chat_prompt, text_prompt, token_prompt
from control_plane.client.prompts import piece_of
from control_plane.intake.tokenization import Tokenizer, document_text
from tests.fakes.cluster import SessionCall, delta_of, text_of, tokens_of
from tests.integration.conftest import all_blocks_free, own_service, until

pytestmark = pytest.mark.integration

SESSIONS = 40
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
CHAT: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8}
HANDED_OFF = (generation.HANDOFF_OUTCOME_PULLED, generation.HANDOFF_OUTCOME_LOCAL)
SYSTEM = [{"role": "system", "content": "Answer from these pages.\n"}]
MODES: tuple[Literal["append", "update"], ...] = ("append", "update")
PAGES = 6
FACTS = 20

# The small service: blocks for about seven of the sessions that are open at once there, host memory for two.
MAX_BACKLOG_TOKENS = 256
HANDOFF_DEADLINE_S = 3
SMALL: dict[str, Any] = {
    "engine__kv_blocks": 136,
    "tiers__host_gib": 0.005,
    "streaming__max_backlog_tokens": MAX_BACKLOG_TOKENS,
    "streaming__progress_interval_ms": 0,
    "handoff__deadline_s": HANDOFF_DEADLINE_S,
}
PIECE_TOKENS = 50
CROWD = 24


@pytest.fixture(autouse=True)
async def nothing_is_left(client: RachisClient) -> AsyncIterator[None]:
    """After every test: no block held, no lease, nothing in flight."""
    yield
    await until(functools.partial(idle, client), "nothing is left", timeout_s=10)


@pytest_asyncio.fixture(scope="module")
async def small(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Target, RachisClient]]:
    """A service with few blocks, a small backlog and a short hand-off deadline, which tells of every progress."""
    async with own_service(tmp_path_factory.mktemp("small"), **SMALL) as running:
        yield running


@pytest.fixture
def other(small: tuple[Target, RachisClient]) -> RachisClient:
    """The small service, as one that has seen nothing of what the shared one is asked."""
    return small[1]


@pytest.fixture
async def call(target: Target) -> AsyncIterator[SessionCall]:
    """A session of the shared service, message by message; not open yet."""
    async with session_call(target) as session:
        yield session


# The answer is that of the whole prompt.


async def test_random_sessions_answer_as_generate_does_with_the_final_prompt(
    client: RachisClient, other: RachisClient, loaded: LoadedConfig
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


async def test_one_token_is_answered_by_the_prefill_worker_alone(client: RachisClient, other: RachisClient) -> None:
    prompt = prompt_tokens(1, 500)
    async with client.session(prompt[:300], **{**GREEDY, "max_tokens": 1}) as session:
        await session.append(prompt[300:])
        answered = await collected(session)
    expected = await other.generate(token_prompt(prompt), **{**GREEDY, "max_tokens": 1})
    assert answered.token_ids == expected.token_ids
    route = answered.completion.route
    assert (route.prefill_worker_id, route.decode_worker_id) == ("prefill-0", "")
    assert route.handoff == generation.HANDOFF_OUTCOME_NONE


async def test_a_thousand_appends_of_one_token_answer_right(client: RachisClient, other: RachisClient) -> None:
    prompt = prompt_tokens(2, 1001)
    started_s = time.monotonic()
    async with client.session(prompt[:1], **GREEDY) as session:
        assert await session.append_all([token] for token in prompt[1:]) == 1000
        answered = await collected(session)
    took_s = time.monotonic() - started_s
    expected = await other.generate(token_prompt(prompt), **GREEDY)
    assert answered.token_ids == expected.token_ids
    tokens = answered.completion.session.tokens
    assert (tokens.inputs, tokens.received_tokens, tokens.computed_tokens) == (1000, 1001, 1001)
    assert took_s < 20


# The chat template around the context.


@dataclass(frozen=True, slots=True)
class Page:
    """What a retriever finds, in the shape of LangChain's documents."""

    page_content: str
    metadata: dict[str, str] = field(default_factory=dict)


async def test_documents_between_system_text_and_question_are_answered_from(
    client: RachisClient, other: RachisClient
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


async def test_an_update_of_a_document_changes_the_answer(client: RachisClient, other: RachisClient) -> None:
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
    other: RachisClient, call: SessionCall
) -> None:
    await call.open("", "UPDATE")
    await call.update(5, "the newer context")
    await call.update(4, "an older context, late")
    assert await call.refused() == ("ABORTED", "update.revision", 3)
    await call.finish(" ends")
    await answers_as(other, call, "the newer context ends")


# What a session may not do leaves it as it is.


@pytest.mark.parametrize("kind", ["append", "update"])
async def test_context_over_the_models_length_is_refused_and_the_session_answers_right(
    other: RachisClient, call: SessionCall, kind: str
) -> None:
    await call.open("it was ", "UPDATE")
    await call.append("blue and ")
    if kind == "append":
        await call.append("x" * 4096)
    else:
        await call.update(1, "x" * 2048, "y" * 2048)
    status, name, number = await call.refused()
    assert (status, name.partition(".")[0], number) == ("OUT_OF_RANGE", kind, 3)
    await call.append("green")
    await call.finish(".")
    await answers_as(other, call, "it was blue and green.")


@pytest.mark.parametrize("after_events", [0, 1, 3])
async def test_an_update_during_hand_off_and_decode_is_refused_and_the_answer_goes_on(
    other: RachisClient, call: SessionCall, after_events: int
) -> None:
    text = " ".join(f"word {number}" for number in range(150))
    await call.open(text, "UPDATE", max_tokens=200, ignore_eos=True)
    await call.finish("!")
    events = [await call.next_event() for _ in range(after_events)]
    await call.update(1, "something else")
    await call.append("and more")
    events += await call.answer()
    refused = [event.refused for event in events if event is not None and event.HasField("refused")]
    assert [(each.status, each.field) for each in refused] == [
        ("FAILED_PRECONDITION", "update"),
        ("FAILED_PRECONDITION", "append"),
    ]
    answer = [event for event in events if event is not None and not event.HasField("refused")]
    expected = await other.generate(text_prompt(f"{text}!"), temperature=0, max_tokens=200, ignore_eos=True)
    assert tokens_of(answer) == expected.token_ids
    assert answer[-1].completion.route.handoff == generation.HANDOFF_OUTCOME_PULLED


# Clients that leave.


async def cancel_the_call(session: SessionCall) -> None:
    session.call.cancel()


async def cancel_by_message(session: SessionCall) -> None:
    await session.send(cancel={})


async def close_its_side(session: SessionCall) -> None:
    await session.call.done_writing()


@pytest.mark.parametrize(
    ("when", "leave"),
    [
        ("taken in", cancel_the_call),
        ("taken in", cancel_by_message),
        ("taken in", close_its_side),
        ("computed", cancel_the_call),
        ("computed", cancel_by_message),
        ("computed", close_its_side),
        ("answering", cancel_the_call),
        ("answering", cancel_by_message),
    ],
)
async def test_a_client_that_leaves_gives_everything_back(
    client: RachisClient, call: SessionCall, when: str, leave: Callable[[SessionCall], Awaitable[None]]
) -> None:
    cancelled = (await client.router_status()).outcomes["cancelled"]
    await call.open("", max_tokens=2000, ignore_eos=True)
    await call.append("".join(random.Random(f"{when} {leave.__name__}").choices("abcdefgh ", k=2000)))
    await call.progressed(lambda progress: progress.inputs == 1)
    if when == "computed":
        await call.progressed(lambda progress: progress.ready_tokens >= 1999)
        assert not await all_blocks_free(client)
    elif when == "answering":
        await call.finish()
        await call.event("first_token")
        await call.event("delta")
    await leave(call)
    if leave is not cancel_the_call:
        assert (await call.failure()).code() is grpc.StatusCode.CANCELLED
    await until(functools.partial(idle, client), "everything is given back", timeout_s=10)
    assert (await client.router_status()).outcomes["cancelled"] == cancelled + 1


async def test_a_client_that_leaves_during_the_hand_off_gives_everything_back_by_its_deadline(
    small: tuple[Target, RachisClient],
) -> None:
    target, client = small
    async with session_call(target) as session:
        await session.open("a page " * 250, max_tokens=500, ignore_eos=True)
        await session.finish()
        await session.event("first_token")
        session.call.cancel()
        await until(functools.partial(idle, client), "everything is given back", HANDOFF_DEADLINE_S + 5)


async def test_a_client_that_closes_its_side_after_finish_hears_the_whole_answer(
    other: RachisClient, call: SessionCall
) -> None:
    await call.open("one, two, ")
    await call.append("three, ")
    await call.finish("four")
    await call.call.done_writing()
    await answers_as(other, call, "one, two, three, four")


# Fewer blocks than sessions want, and a backlog that they fill.


async def test_sessions_that_do_not_fit_are_preempted_by_both_kinds_and_answer_right(
    client: RachisClient, small: tuple[Target, RachisClient]
) -> None:
    _, crowded = small
    rng = random.Random(9)
    questions = [recall.make_question(rng, rng.randint(400, 900), FACTS) for _ in range(CROWD)]
    others = [recall.make_question(rng, 600, FACTS) for _ in range(CROWD // 4)]
    answers, _ = await asyncio.gather(
        asyncio.gather(*(asked(crowded, question) for question in questions)),
        asyncio.gather(*(given_up(crowded, question) for question in others)),
    )
    await until(functools.partial(idle, crowded), "nothing is left", timeout_s=10)
    records = [answered.completion.session for answered in answers]
    assert sum(record.preemptions_swap for record in records) > 0
    assert sum(record.preemptions_recompute for record in records) > 0
    for question, answered in zip(questions, answers, strict=True):
        expected = await client.generate(text_prompt(question.text), **GREEDY)
        assert answered.text.startswith(question.answer)
        assert answered.token_ids == expected.token_ids


async def test_a_client_faster_than_prefill_is_slowed_at_the_backlog_limit(
    target: Target, client: RachisClient, small: tuple[Target, RachisClient]
) -> None:
    prompt = prompt_tokens(7, 3500)
    lead, answer = await sent_at_once(small[0], prompt)
    # The negative control: where the limit is far away the same client is far ahead.
    free_lead, free_answer = await sent_at_once(target, prompt)
    expected = await client.generate(token_prompt(prompt), **GREEDY)
    assert answer == free_answer == expected.token_ids
    assert 0 < lead <= MAX_BACKLOG_TOKENS + PIECE_TOKENS
    assert free_lead > 4 * MAX_BACKLOG_TOKENS
    await until(functools.partial(idle, small[1]), "nothing is left", timeout_s=10)


# Workers that die.


async def test_a_session_goes_on_when_its_prefill_worker_is_killed(tmp_path: Path, other: RachisClient) -> None:
    prompt = prompt_tokens(8, 1500)
    expected = await other.generate(token_prompt(prompt), **GREEDY)
    async with own_service(tmp_path, pools__prefill__workers=2, pools__prefill__cpus_per_worker=0.25) as (_, client):
        # The other worker takes the session over, with the prompt as it stands.
        async with client.session(**GREEDY) as session:
            await session.append(prompt[:700])
            await until(functools.partial(computed, session, 1), "the first part is computed")
            first = session.prefill_worker_id
            os.kill(await process_of(client, first), signal.SIGKILL)
            await session.append(prompt[700:1400])
            await until(functools.partial(computed, session, 2), "the other worker is as far")
            reopened = await collected(session, prompt[1400:])
        second = reopened.completion.route.prefill_worker_id
        assert {first, second} == {"prefill-0", "prefill-1"}
        assert reopened.completion.route.handoff in HANDED_OFF
        # Of what the first worker knew it computed all but the last token.
        assert reopened.completion.session.tokens.computed_tokens == 699 + 1500
        assert reopened.token_ids == expected.token_ids
        # Now there is no other one: the decode worker computes the prompt once it is whole.
        async with client.session(prompt[:700], **GREEDY) as session:
            assert session.prefill_worker_id == second
            os.kill(await process_of(client, second), signal.SIGKILL)
            await session.append(prompt[700:1400])
            recomputed = await collected(session, prompt[1400:])
        assert recomputed.token_ids == expected.token_ids
        route = recomputed.completion.route
        assert (route.prefill_worker_id, route.handoff) == ("", generation.HANDOFF_OUTCOME_NONE)
        assert not recomputed.completion.HasField("session")
        await until(functools.partial(decode_worker_holds_nothing, client), "the blocks are back", timeout_s=10)


# What the tests play and ask.


async def whole(client: RachisClient, case: identity.Case) -> Generated:
    return await client.generate(token_prompt(case.token_ids), **case.sampling)


async def play(client: RachisClient, case: identity.Case, rng: random.Random) -> Generated:
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


Move = tuple[str, list[int]]


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


async def collected(session: ClientSession, closing: Any = None) -> Generated:
    """The session's answer, whole."""
    generated = Generated()
    async for delta in session.finish(closing or None):
        generated.add(delta)
    generated.completion = session.completion
    return generated


async def asked(client: RachisClient, question: recall.RecallQuestion) -> Generated:
    async with client.session(**GREEDY) as session:
        await send_pages(session, question)
        return await collected(session, question.question)


async def given_up(client: RachisClient, question: recall.RecallQuestion) -> None:
    """The client leaves when all pages are computed."""
    async with client.session(**GREEDY) as session:
        await send_pages(session, question)


async def send_pages(session: ClientSession, question: recall.RecallQuestion) -> None:
    """One by one, each when the ones before are computed."""
    for number, page in enumerate(pages_of(question), 1):
        await session.append(page.page_content)
        await until(functools.partial(computed, session, number), "the page is computed")


async def computed(session: ClientSession, inputs: int) -> bool:
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


async def retrieved(question: recall.RecallQuestion) -> AsyncIterator[Page]:
    for page in pages_of(question):
        yield page


def asking(question: recall.RecallQuestion) -> list[dict[str, str]]:
    return [{"role": "user", "content": question.question}]


def conversation(question: recall.RecallQuestion) -> list[dict[str, str]]:
    """The messages that a session over the question's pages comes to."""
    shown = "".join(document_text(piece_of(page).document) for page in pages_of(question))
    return [{"role": "system", "content": SYSTEM[0]["content"] + shown}, *asking(question)]


@asynccontextmanager
async def session_call(target: Target) -> AsyncIterator[SessionCall]:
    async with grpc.aio.insecure_channel(target.address) as channel:
        method: Any = router_pb2_grpc.RouterServiceStub(channel).StreamGenerate
        yield SessionCall(method(timeout=60))


async def answers_as(other: RachisClient, session: SessionCall, text: str) -> None:
    answer = await session.answer()
    expected = await other.generate(text_prompt(text), **CHAT)
    assert tokens_of(answer) == expected.token_ids
    assert text_of(answer) == expected.text


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


async def idle(client: RachisClient) -> bool:
    """All blocks are free, nothing is leased, and the router has no request."""
    status = await client.router_status()
    return not (status.in_flight_requests or status.queued_requests) and await all_blocks_free(client)


async def decode_worker_holds_nothing(client: RachisClient) -> bool:
    loads = [view.load for view in await client.workers() if view.registration.pool == wire.POOL_DECODE]
    return all(load.free_blocks == load.total_blocks > 0 and not load.running_requests for load in loads)


async def process_of(client: RachisClient, worker_id: str) -> int:
    records = [view.registration for view in await client.workers()]
    return next(record.pid for record in records if record.worker_id == worker_id)
