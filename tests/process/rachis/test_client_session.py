"""The Python client's sessions, against the real router over fake engines, and the shapes of documents it takes."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from rachis import (
    AsyncClient,
    AsyncSession,
    InvalidInputError,
    RefusedError,
    chat_prompt,
    stream_documents,
    text_prompt,
)
from rachis.outbox import Sent
from rachis.prompts import each_of, piece_of
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import router_pb2 as api

from control_plane.model.lifecycle import State
from tests.fakes.answers import session_text
from tests.fakes.cluster import DECODE, PREFILL, SESSION_DEADLINE_S, Cluster, named, running_cluster, until

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8}


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(cluster.router.address) as client:
        yield client


def opened(cluster: Cluster, client: AsyncClient, prefix: Any = "hello", **values: Any) -> AsyncSession:
    """A session that the cluster counts."""
    cluster.calls += 1
    return client.session(prefix, **{**GREEDY, **values})


async def answer(session: AsyncSession, closing: Any = None) -> str:
    return "".join([delta.text async for delta in session.finish(closing)])


async def test_a_session_appends_finishes_and_has_its_completion(cluster: Cluster, client: AsyncClient) -> None:
    async with opened(cluster, client, request_id="mine") as session:
        await session.append(" wide")
        await session.append([*b" world"])
        text = await answer(session, "!")

    assert text == session_text("hello wide world!")
    assert (session.request_id, session.prefill_worker_id) == ("mine", "prefill-0")
    assert session.completion.usage.prompt_tokens == 17
    assert session.first_token is not None
    assert session.completion.session.ttft_from_finish_ms == session.first_token.ttft_from_finish_ms > 0
    assert session.progress.received_tokens > 0
    assert not session.refusals


async def test_priority_goes_with_requests_and_sessions(cluster: Cluster, client: AsyncClient) -> None:
    cluster.calls += 1
    generated = await client.generate(text_prompt("hello"), priority=-2, **GREEDY)
    async with opened(cluster, client, priority=3) as session:
        assert await answer(session) == generated.text

    assert [job.priority for job in named(cluster, "decode-0").engine.jobs] == [-2, 3]


async def test_updates_count_their_revisions(cluster: Cluster, client: AsyncClient) -> None:
    async with opened(cluster, client, mode="update") as session:
        await session.update(" one piece")
        await session.update([" two", [*b" pieces"]])
        await session.append(".")
        assert await answer(session) == session_text("hello two pieces.")


async def test_an_update_to_nothing_empties_the_context(cluster: Cluster, client: AsyncClient) -> None:
    async with opened(cluster, client, mode="update") as session:
        await session.append(" world")
        await session.update([])
        assert await answer(session) == session_text("hello")


async def test_chat_messages_may_open_and_close_a_session(cluster: Cluster, client: AsyncClient) -> None:
    async with opened(cluster, client, [{"role": "system", "content": "read: "}]) as session:
        await session.append("this")
        text = await answer(session, chat_prompt([{"role": "user", "content": "so?"}]))

    assert text == session_text("read: this\nso?\n")


async def test_a_session_that_is_refused_raises_on_entering(cluster: Cluster, client: AsyncClient) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with opened(cluster, client, model="other"):
            raise AssertionError("it was never open")

    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "open.model" in (caught.value.details() or "")


async def test_a_refused_append_raises_in_the_next_call_and_the_session_goes_on(
    cluster: Cluster, client: AsyncClient
) -> None:
    async with opened(cluster, client) as session:
        await session.append("x" * 600)
        await until(lambda: bool(session.refusals))

        with pytest.raises(RefusedError, match=r"append\.piece: makes a prompt of 605 tokens") as caught:
            await session.append(" lost")

        assert (caught.value.status, caught.value.field) == ("OUT_OF_RANGE", "append.piece")
        assert caught.value.message_number == 2
        await session.append(" world")
        assert await answer(session) == session_text("hello world")


async def test_a_refused_finish_raises_there_and_the_session_can_be_finished_again(
    cluster: Cluster, client: AsyncClient
) -> None:
    async with opened(cluster, client, None) as session:
        for _ in range(2):
            with pytest.raises(RefusedError, match="the prompt has no tokens"):
                await answer(session)
            assert not session.answering
        await session.append("hello")
        assert await answer(session) == session_text("hello")
        assert session.answering


async def test_an_append_that_is_refused_while_the_answer_is_awaited_raises_and_the_answer_goes_on(
    cluster: Cluster, client: AsyncClient
) -> None:
    async with opened(cluster, client) as session:
        answering = session.finish()
        # The finish counts as sent before the refusal of the append can be heard.
        session._finish = Sent(None, asyncio.get_running_loop().create_future())
        await session.append("x" * 600)
        await until(lambda: bool(session.refusals))
        with pytest.raises(RefusedError, match=r"append\.piece"):
            await anext(answering)

        assert "".join([delta.text async for delta in session.deltas()]) == session_text("hello")


async def test_leaving_the_block_early_cancels_the_session(cluster: Cluster, client: AsyncClient) -> None:
    async with opened(cluster, client) as session:
        await session.append(" world")

    await until(cluster.idle)
    await cluster.ends_with({State.CANCELLED: 1})


async def test_an_error_in_the_block_cancels_the_session(cluster: Cluster, client: AsyncClient) -> None:
    with pytest.raises(ZeroDivisionError):
        async with opened(cluster, client):
            raise ZeroDivisionError

    await until(cluster.idle)
    await cluster.ends_with({State.CANCELLED: 1})


async def test_leaving_the_answer_early_cancels_the_session(cluster: Cluster, client: AsyncClient) -> None:
    named(cluster, "decode-0").engine.hold_before(3)
    async with opened(cluster, client) as session:
        async for _ in session.finish():
            break

    await until(cluster.idle)
    await cluster.ends_with({State.CANCELLED: 1})


async def test_what_ends_the_session_is_raised_by_the_answer_and_by_every_call_after_it() -> None:
    async with running_cluster(streaming__idle_timeout_s=2.0) as cluster:
        await cluster.add(PREFILL)
        await cluster.add(DECODE)
        async with AsyncClient(cluster.router.address) as client, opened(cluster, client) as session:
            await until(lambda: session.ended)
            for _ in range(2):
                with pytest.raises(grpc.aio.AioRpcError, match="no input came"):
                    await session.append("too late")
            with pytest.raises(grpc.aio.AioRpcError, match="no input came"):
                await answer(session)


async def test_the_clients_timeout_ends_the_session(cluster: Cluster, client: AsyncClient) -> None:
    async with opened(cluster, client, timeout_s=SESSION_DEADLINE_S) as session:
        await until(lambda: session.ended)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await answer(session)

    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


# Documents.


@dataclass
class LangChainDocument:
    page_content: str
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass
class LlamaIndexNode:
    content: str
    metadata: dict[str, Any] = field(default_factory=dict)

    def get_content(self) -> str:
        return self.content


@dataclass
class TextNode:
    text: str


@pytest.mark.parametrize(
    ("given", "piece"),
    [
        ("text", api.SessionPiece(text="text")),
        ("", api.SessionPiece(text="")),
        ([1, 2], api.SessionPiece(token_ids=generation.TokenIds(ids=[1, 2]))),
        (api.Document(title="t", content="c"), api.SessionPiece(document=api.Document(title="t", content="c"))),
        (api.SessionPiece(text="text"), api.SessionPiece(text="text")),
        (
            LangChainDocument("c", {"title": "t", "source": "s"}),
            api.SessionPiece(document=api.Document(title="t", content="c")),
        ),
        (LangChainDocument("c"), api.SessionPiece(document=api.Document(content="c"))),
        (LlamaIndexNode("c", {"title": "t"}), api.SessionPiece(document=api.Document(title="t", content="c"))),
        (TextNode("c"), api.SessionPiece(document=api.Document(content="c"))),
    ],
)
def test_a_piece_is_taken_by_its_shape(given: Any, piece: api.SessionPiece) -> None:
    assert piece_of(given) == piece


@pytest.mark.parametrize("given", [None, 7, {}, [], ["text"], TextNode(7)])  # type: ignore[arg-type]
def test_what_has_no_text_is_no_piece(given: Any) -> None:
    with pytest.raises(InvalidInputError, match="a piece is text, token ids or a document"):
        piece_of(given)


async def found() -> AsyncIterator[Any]:
    yield LangChainDocument("first", {"title": "1"})
    yield LlamaIndexNode("second")
    yield "third"


def found_in_a_list() -> Iterator[Any]:
    yield LangChainDocument("first", {"title": "1"})
    yield from (LlamaIndexNode("second"), "third")


@pytest.mark.parametrize("source", [found, found_in_a_list, lambda: list(found_in_a_list())])
async def test_what_a_retriever_finds_is_appended_as_it_is_found(
    cluster: Cluster, client: AsyncClient, source: Any
) -> None:
    async with opened(cluster, client) as session:
        assert await session.append_all(source()) == 3
        assert await answer(session) == session_text("hello1\nfirst\n\nsecond\n\nthird")


async def test_stream_documents_opens_appends_finishes_and_answers(cluster: Cluster, client: AsyncClient) -> None:
    deltas = stream_documents(opened(cluster, client), found(), "?")

    assert "".join([delta.text async for delta in deltas]) == session_text("hello1\nfirst\n\nsecond\n\nthird?")


async def test_a_retriever_that_fails_cancels_the_session(cluster: Cluster, client: AsyncClient) -> None:
    async def failing() -> AsyncIterator[str]:
        yield "first"
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        async for _ in stream_documents(opened(cluster, client), failing()):
            pass

    await until(cluster.idle)
    await cluster.ends_with({State.CANCELLED: 1})


async def test_a_plain_iterator_is_advanced_off_the_loop() -> None:
    def threads() -> Iterator[int]:
        yield threading.get_ident()

    assert [each async for each in each_of(threads())] != [threading.get_ident()]
