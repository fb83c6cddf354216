"""LangChain over gRPC: chats and retrievers."""

import asyncio
from typing import Any

from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from rachis import Client, InvalidInputError
from rachis.langchain import ChatRachis, SessionAnswer

FACTS = "k1=blue; k2=red; k17=melon; k1="
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 6}


class Pages(BaseRetriever):
    """Finds what it is given, unless it is told to fail."""

    pages: list[str]
    fails: bool = False

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        if self.fails:
            raise LookupError("no such index")
        return [Document(page_content=page, metadata={"title": "a page"}) for page in self.pages]


def plain(address: str, prompt: Any) -> str:
    with Client(address) as client:
        return client.generate(prompt, **GREEDY).text


def check_a_chat_says_what_the_client_says(address: str, _http: str) -> None:
    chat = ChatRachis(address=address, sampling={"ignore_eos": True}, **GREEDY)
    with Client(address) as client:
        expected = client.generate([{"role": "user", "content": FACTS}], ignore_eos=True, **GREEDY).text
    answer = chat.invoke(FACTS)
    assert isinstance(answer, AIMessage)
    assert answer.content == expected
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] == 6
    assert answer.response_metadata["finish_reason"] == "length"
    assert chat.invoke([HumanMessage(FACTS)]).content == expected
    assert "".join(str(chunk.content) for chunk in chat.stream(FACTS)) == expected
    whole = None
    for chunk in chat.stream(FACTS):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["total_tokens"] == answer.usage_metadata["total_tokens"]


async def check_it_says_it_in_any_event_loop(address: str, _http: str) -> None:
    chat = ChatRachis(address=address, **GREEDY)
    expected = await asyncio.to_thread(plain, address, [{"role": "user", "content": FACTS}])
    assert (await chat.ainvoke(FACTS)).content == expected
    assert "".join([str(chunk.content) async for chunk in chat.astream(FACTS)]) == expected
    assert [each.content for each in await chat.abatch([FACTS] * 4)] == [expected] * 4
    assert (await asyncio.to_thread(asyncio.run, chat.ainvoke(FACTS))).content == expected
    assert (await asyncio.to_thread(chat.invoke, FACTS)).content == expected


def check_a_chain_is_a_chain(address: str, _http: str) -> None:
    prompt = ChatPromptTemplate.from_messages([("system", "Facts: {facts}"), ("human", "{question}")])
    chain = prompt | ChatRachis(address=address, max_tokens=6, temperature=0.0) | StrOutputParser()
    turns = [{"role": "system", "content": "Facts: k1=blue;"}, {"role": "user", "content": "k1="}]
    assert chain.invoke({"facts": "k1=blue;", "question": "k1="}) == plain(address, turns)
    bound = ChatRachis(address=address).bind(temperature=0.0, max_tokens=1)
    assert bound.invoke(FACTS).usage_metadata["output_tokens"] == 1
    stopped = ChatRachis(address=address, temperature=0.0, max_tokens=30).invoke(FACTS, stop=[";"])
    assert ";" not in stopped.content
    assert stopped.response_metadata["finish_reason"] == "stop"
    general = ChatRachis(address=address, sampling={"stop": ";", "temperature": 0.0, "max_tokens": 30}).invoke(FACTS)
    assert (general.content, general.response_metadata["finish_reason"]) == (stopped.content, "stop")


def check_what_cannot_be_said_is_refused_by_its_field(address: str, _http: str) -> None:
    chat = ChatRachis(address=address, **GREEDY)
    picture = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    refused: list[tuple[Any, str]] = [
        ([HumanMessage([picture])], "messages[0].content"),
        ([SystemMessage("hello"), ToolMessage("7", tool_call_id="1")], "messages[1]"),
        ([], ""),
    ]
    for messages, field in refused:
        try:
            chat.invoke(messages)
        except InvalidInputError as error:
            assert not field or error.field == field, (error.field, field)
        else:
            raise AssertionError(f"{messages} was taken")
    try:
        chat.invoke(FACTS, top_p=7.0)
    except InvalidInputError as error:
        assert error.field == "sampling.top_p"
    else:
        raise AssertionError("top_p 7 was taken")


def check_retrievers_fill_a_session(address: str, _http: str) -> None:
    first, second = Pages(pages=["k1=blue; ", "k2=red; "]), Pages(pages=["k3=pear; "])
    answer = SessionAnswer(
        address=address,
        retrievers=[first, second],
        prefix="Facts: ",
        closing=lambda asked: f"{asked}=",
        sampling=GREEDY,
    )
    texts = list(answer.stream("k2"))
    assert len("".join(texts)) > 0
    # The order of the two retrievers is theirs.
    with Client(address) as client:
        possible = []
        for order in ([first, second], [second, first]):
            with client.session("Facts: ", **GREEDY) as session:
                for retriever in order:
                    session.append_all(retriever.invoke("k2"))
                possible.append("".join(delta.text for delta in session.finish("k2=")))
    assert "".join(texts) in possible
    assert answer.invoke("k2") in possible
    assert asyncio.run(answer.ainvoke("k2")) in possible


def check_a_retriever_that_fails_ends_the_session(address: str, _http: str) -> None:
    answer = SessionAnswer(
        address=address, retrievers=[Pages(pages=["k1=blue; "]), Pages(pages=[], fails=True)], sampling=GREEDY
    )
    try:
        answer.invoke("k1")
    except LookupError as error:
        assert "no such index" in str(error)
    else:
        raise AssertionError("the answer came without it")
