"""Turns prompts into tokens, as the engine would: the model's own tokenizer and chat template (transformers)."""

import asyncio
from typing import Any

from rachis.v1 import generation_pb2 as generation

from cluster_core.errors import InvalidInputError, StartError

# Below this many characters a thread costs more than the tokenizer.
_INLINE_CHARACTERS = 8_192


class Tokenizer:
    """Created without loading; `load` once before use."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._tokenizer: Any = None

    async def load(self) -> None:
        """Raises StartError when the model has no tokenizer that loads."""
        try:
            self._tokenizer = await asyncio.to_thread(_load, self._path)
        except (OSError, ValueError) as error:
            raise StartError(f"the tokenizer of {self._path} does not load: {error}", field="model.path") from None

    async def token_ids(self, prompt: generation.PromptInput) -> list[int]:
        """Tokens of a prompt in any of its three forms. Raises InvalidInputError when the template refuses it."""
        if prompt.HasField("token_ids"):
            return list(prompt.token_ids.ids)
        if prompt.HasField("text"):
            return await self._encode(prompt.text, special=True)
        return await self._encode(self._rendered(prompt.chat), special=False)

    def encode(self, text: str) -> list[int]:
        """Tokens of a text as a prompt."""
        return self._encode_now(text, special=True)

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

    def _encode_now(self, text: str, *, special: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special)
        return ids


def _load(path: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)
