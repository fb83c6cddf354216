"""Turns prompts into tokens, as the engine would: the model's own tokenizer and chat template (transformers).

The prompt of a session comes in pieces that are tokenized one by one. Of chat messages the last one stays open: the
template is rendered with a mark at its end, and what stands around the mark is the frame of the session's context.
"""

import asyncio
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rachis.v1 import generation_pb2 as generation
from rachis.v1 import router_pb2 as api

from cluster_core.errors import InvalidInputError, StartError

# Below this many characters a thread costs more than the tokenizer.
_INLINE_CHARACTERS = 8_192
# What a message or a piece costs, however short its text is.
_EACH_CHARACTERS = 64
# Two characters for private use: no template changes them, and nobody's text has them.
_MARK = "\ue0f0session\ue0f1"


@dataclass(frozen=True, slots=True)
class Frame:
    """What stands before and after a session's context, in tokens."""

    head: list[int]
    tail: list[int]


class Tokenizer:
    """Created without loading; `load` once before use."""

    def __init__(self, path: str, *, beside_models: bool = True) -> None:
        """beside_models: whether this process may run models as well; a router does not."""
        self._path = path
        self._beside_models = beside_models
        self._tokenizer: Any = None

    async def load(self) -> None:
        """Raises StartError when the model has no tokenizer that loads."""
        try:
            self._tokenizer = await asyncio.to_thread(_load, self._path, self._beside_models)
        except (OSError, ValueError) as error:
            raise StartError(f"the tokenizer of {self._path} does not load: {error}", field="model.path") from None

    async def token_ids(self, prompt: generation.PromptInput) -> list[int]:
        """Tokens of a prompt in any of its three forms. Raises InvalidInputError when the template refuses it."""
        if prompt.HasField("token_ids"):
            return list(prompt.token_ids.ids)
        if prompt.HasField("text"):
            return await self._encode(prompt.text, special=True)
        return await self._encode(await self._render(prompt.chat), special=False)

    async def frame(self, prefix: generation.PromptInput, closing: generation.ChatMessages | None = None) -> Frame:
        """The frame of a session with that prefix; `closing` are turns after the open one.

        Without a prefix the context begins the prompt, and nothing stands before it. Raises InvalidInputError when the
        template refuses the messages, or changes what a message of them ends with.
        """
        if not prefix.HasField("chat"):
            return Frame(await self.token_ids(prefix) if prefix.WhichOneof("input") else [], [])
        before, mark, after = (await self._render(_marked(prefix.chat, closing))).partition(_MARK)
        if not mark or _MARK in after:
            raise InvalidInputError(
                "the chat template does not show where its last message ends", field="open.prefix.chat"
            )
        return Frame(await self._encode(before, special=False), await self._encode(after, special=False))

    async def piece(self, piece: api.SessionPiece) -> list[int]:
        """Tokens of a piece, by itself."""
        if piece.HasField("token_ids"):
            return list(piece.token_ids.ids)
        return await self._encode(_text_of(piece), special=False)

    async def pieces(self, pieces: Sequence[api.SessionPiece]) -> list[int]:
        """Tokens of all of them, each by itself. Many small ones take as long as a large one."""
        if sum(len(_text_of(piece)) + _EACH_CHARACTERS for piece in pieces) < _INLINE_CHARACTERS:
            return self._pieces_now(pieces)
        return await asyncio.to_thread(self._pieces_now, pieces)

    def encode(self, text: str) -> list[int]:
        """Tokens of a text as a prompt."""
        return self._encode_now(text, special=True)

    async def _render(self, chat: generation.ChatMessages) -> str:
        size = sum(len(message.content) + _EACH_CHARACTERS for message in chat.messages)
        if size < _INLINE_CHARACTERS:
            return self._rendered(chat)
        return await asyncio.to_thread(self._rendered, chat)

    def _rendered(self, chat: generation.ChatMessages) -> str:
        messages = [{"role": message.role, "content": message.content} for message in chat.messages]
        try:
            text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # noqa: BLE001 - a template is a program of the model's author and raises what it likes
            raise InvalidInputError(f"the chat template refuses it: {error}", field="prompt.chat") from None
        return text

    async def _encode(self, text: str, *, special: bool) -> list[int]:
        if len(text) < _INLINE_CHARACTERS:
            return self._encode_now(text, special=special)
        return await asyncio.to_thread(self._encode_now, text, special=special)

    def _pieces_now(self, pieces: Sequence[api.SessionPiece]) -> list[int]:
        tokens: list[int] = []
        for piece in pieces:
            is_text = not piece.HasField("token_ids")
            tokens += self._encode_now(_text_of(piece), special=False) if is_text else piece.token_ids.ids
        return tokens

    def _encode_now(self, text: str, *, special: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special)
        return ids


def _text_of(piece: api.SessionPiece) -> str:
    return document_text(piece.document) if piece.HasField("document") else piece.text


def document_text(document: api.Document) -> str:
    """A document as it stands in a prompt."""
    title = f"{document.title}\n" if document.title else ""
    return f"{title}{document.content}\n\n"


def _marked(prefix: generation.ChatMessages, closing: generation.ChatMessages | None) -> generation.ChatMessages:
    """All messages, with the mark at the end of the prefix's last one."""
    marked = generation.ChatMessages(messages=prefix.messages)
    marked.messages[-1].content += _MARK
    if closing is not None:
        marked.messages.extend(closing.messages)
    return marked


def _load(path: str, beside_models: bool) -> Any:
    with contextlib.nullcontext() if beside_models else _without_torch():
        from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


@contextlib.contextmanager
def _without_torch() -> Iterator[None]:
    """transformers is imported as where there is no torch, for good: 3 s of computing and 250 MB less."""
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]
    # It would say that models are not available.
    silent = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    before = os.environ.get(silent)
    os.environ[silent] = "1"
    try:
        yield
    finally:
        del sys.modules["torch"]
        del os.environ[silent]
        if before is not None:
            os.environ[silent] = before
