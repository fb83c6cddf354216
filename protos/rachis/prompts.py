"""What a Python client may give as a prompt or as a piece of one, as messages of the API.

What a retriever finds is taken by its shape, without importing the library: `page_content` and `metadata` as
LangChain's documents have them, `get_content()` or `text` as LlamaIndex's nodes have them. A title is taken from the
metadata.
"""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rachis.errors import InvalidInputError
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import router_pb2 as api

_END = object()
# Of a chat message, as of the API's.
_TURN = ("role", "content")

# What a client may give as a prompt: text, token ids, chat messages, or the message of the API.
Prompt = str | Sequence[int] | Sequence[Mapping[str, str]] | generation.PromptInput


def text_prompt(text: str) -> generation.PromptInput:
    return generation.PromptInput(text=text)


def token_prompt(token_ids: Sequence[int]) -> generation.PromptInput:
    return generation.PromptInput(token_ids=generation.TokenIds(ids=token_ids))


def chat_prompt(messages: Sequence[Mapping[str, str]], field: str = "prompt") -> generation.PromptInput:
    """Of messages that have a role and a content, both text. field: that they are given for. Raises
    InvalidInputError."""
    with _naming(field):
        return generation.PromptInput(chat=generation.ChatMessages(messages=map(_turn, messages)))


def prompt_of(given: Any, field: str = "prompt") -> generation.PromptInput | None:
    """A prompt from a str, token ids, chat messages as dicts, or a `PromptInput`; None stays None.

    field: that it is given for. Raises InvalidInputError for anything else.
    """
    if given is None or isinstance(given, generation.PromptInput):
        return given
    with _naming(field):
        if isinstance(given, str):
            return text_prompt(given)
        if is_token_ids(given):
            return token_prompt(given)
        if isinstance(given, Sequence) and all(isinstance(turn, Mapping) for turn in given):
            return chat_prompt(given, field)
        raise TypeError(f"a prompt is text, token ids or chat messages, not {type(given).__name__}")


def piece_of(given: Any) -> api.SessionPiece:
    """A piece from a str, token ids, a `Document`, or a retriever's document. Raises InvalidInputError for anything
    else."""
    if isinstance(given, api.SessionPiece):
        return given
    with _naming("piece"):
        return _piece_of(given)


@contextmanager
def _naming(field: str) -> Iterator[None]:
    """What messages of the API do not take is a mistake in this field."""
    try:
        yield
    except KeyError as missing:
        raise InvalidInputError.local(f"each chat message has a {missing.args[0]}", field=field) from None
    except (TypeError, ValueError) as error:
        raise InvalidInputError.local(str(error), field=field) from None


def _turn(message: Mapping[str, Any]) -> generation.ChatMessage:
    """What a library writes down as None, or as an empty list, says nothing."""
    said = {key for key, value in message.items() if value is not None and value != [] and value != {}}
    if more := sorted(map(str, said.difference(_TURN))):
        raise TypeError(f"a chat message has role and content, and no {more[0]}; the HTTP API takes more")
    for key in _TURN:
        if not isinstance(message[key], str):
            raise TypeError(f"the {key} of a chat message is text, not {type(message[key]).__name__}")
    return generation.ChatMessage(role=message["role"], content=message["content"])


def _piece_of(given: Any) -> api.SessionPiece:
    if isinstance(given, str):
        return api.SessionPiece(text=given)
    if isinstance(given, api.Document):
        return api.SessionPiece(document=given)
    if is_token_ids(given):
        return api.SessionPiece(token_ids=generation.TokenIds(ids=given))
    content = _content_of(given)
    if not isinstance(content, str):
        raise TypeError(f"a piece is text, token ids or a document, not {type(given).__name__}")
    metadata = getattr(given, "metadata", None)
    title = metadata.get("title") if isinstance(metadata, Mapping) else None
    return api.SessionPiece(document=api.Document(title=str(title or ""), content=content))


async def each_of(given: AsyncIterable[Any] | Iterable[Any]) -> AsyncIterator[Any]:
    """What an iterator gives. A plain one may wait for its source, so a thread advances it."""
    if isinstance(given, AsyncIterable):
        async for item in given:
            yield item
        return
    items = iter(given)
    while (item := await asyncio.to_thread(next, items, _END)) is not _END:
        yield item


def is_token_ids(given: Any) -> bool:
    """A sequence of numbers, not an empty one."""
    listed = isinstance(given, Sequence) and not isinstance(given, str | bytes)
    return listed and bool(given) and all(isinstance(token, int) for token in given)


def _content_of(given: Any) -> Any:
    if hasattr(given, "page_content"):
        return given.page_content
    if callable(getattr(given, "get_content", None)):
        return given.get_content()
    return getattr(given, "text", None)
