"""LlamaIndex over gRPC: completions, chats and retrievers."""

import asyncio
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ImageBlock, MessageRole
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from rachis import Client, InvalidInputError
from rachis.llama_index import RachisLLM, SessionQueryEngine

FACTS = "k1=blue; k2=red; k17=melon; k1="
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 6}


class Nodes(BaseRetriever):
    """Finds what it is given."""

    def __init__(self, texts: list[str]) -> None:
        self._texts = texts
        super().__init__()

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [NodeWithScore(node=TextNode(text=text), score=1.0) for text in self._texts]


def plain(address: str, prompt: Any) -> str:
    with Client(address) as client:
        return client.generate(prompt, **GREEDY).text


def check_a_completion_says_what_the_client_says(address: str, _http: str) -> None:
    llm, expected = RachisLLM(address=address, **GREEDY), plain(address, FACTS)
    answer = llm.complete(FACTS)
    assert answer.text == expected
    assert answer.additional_kwargs["completion_tokens"] == 6
    pieces = list(llm.stream_complete(FACTS))
    assert pieces[-1].text == expected
    assert "".join(piece.delta or "" for piece in pieces) == expected


def check_a_chat_does(address: str, _http: str) -> None:
    llm, expected = RachisLLM(address=address, **GREEDY), plain(address, [{"role": "user", "content": FACTS}])
    turns = [ChatMessage(role=MessageRole.USER, content=FACTS)]
    assert llm.chat(turns).message.content == expected
    assert [each.message.content for each in llm.stream_chat(turns)][-1] == expected
    try:
        llm.chat([ChatMessage(role=MessageRole.USER, blocks=[ImageBlock(url="https://example.org/a.png")])])
    except InvalidInputError as error:
        assert error.field == "messages[0].content"
    else:
        raise AssertionError("a picture was taken")


async def check_it_does_in_an_event_loop(address: str, _http: str) -> None:
    llm = RachisLLM(address=address, **GREEDY)
    expected = await asyncio.to_thread(plain, address, FACTS)
    assert (await llm.acomplete(FACTS)).text == expected
    assert [piece.text async for piece in await llm.astream_complete(FACTS)][-1] == expected
    turns = [ChatMessage(role=MessageRole.USER, content=FACTS)]
    chatted = await asyncio.to_thread(plain, address, [{"role": "user", "content": FACTS}])
    assert (await llm.achat(turns)).message.content == chatted
    assert [piece.message.content async for piece in await llm.astream_chat(turns)][-1] == chatted


def check_retrievers_fill_a_session(address: str, _http: str) -> None:
    engine = SessionQueryEngine(
        address=address,
        retrievers=[Nodes(["k1=blue; ", "k2=red; "])],
        prefix="Facts: ",
        closing=lambda asked: f"{asked}=",
        sampling=GREEDY,
    )
    with Client(address) as client, client.session("Facts: ", **GREEDY) as session:
        session.append_all(Nodes(["k1=blue; ", "k2=red; "]).retrieve("k2"))
        expected = "".join(delta.text for delta in session.finish("k2="))
    found = engine.query("k2")
    assert str(found) == expected
    assert [node.text for node in found.source_nodes] == ["k1=blue; ", "k2=red; "]
    assert str(asyncio.run(engine.aquery("k2"))) == expected
