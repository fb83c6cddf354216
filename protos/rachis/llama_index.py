"""LlamaIndex: a language model, and a query engine that answers from retrievers while they search
(`rachis-client[llama-index]`).

    llm = RachisLLM(address="127.0.0.1:7421", context_window=4096)
    engine = SessionQueryEngine(address="127.0.0.1:7421", retrievers=[index.as_retriever()])
    print(engine.query("Who was it?"))
"""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
)
from llama_index.core.base.response.schema import Response
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.custom import CustomLLM
from llama_index.core.query_engine import CustomQueryEngine
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore
from pydantic import Field, PrivateAttr, SecretStr

from rachis.client import DEFAULT_TIMEOUT_S
from rachis.errors import InvalidInputError
from rachis.prompts import Prompt
from rachis.retrieval import answer_from
from rachis.shared_client import SharedClient
from rachis.v1 import generation_pb2 as generation

_ROLES = {MessageRole.USER: "user", MessageRole.ASSISTANT: "assistant", MessageRole.SYSTEM: "system"}


class RachisLLM(CustomLLM):
    """Chats and completions over gRPC, streamed or not. What a call is given goes over `sampling`.

    context_window: of the model, in tokens. sampling: further fields of `SamplingParams`. api_key,
    max_retries: as of `rachis.AsyncClient`. Raises RachisError, InvalidInputError.
    """

    address: str
    context_window: int = 4096
    max_tokens: int = 256
    temperature: float = 0.0
    sampling: dict[str, Any] = Field(default_factory=dict)
    timeout_s: float = DEFAULT_TIMEOUT_S
    api_key: SecretStr | None = None
    max_retries: int = 2
    model_name: str = "rachis"
    _client: SharedClient = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        super().model_post_init(context)
        api_key = self.api_key.get_secret_value() if self.api_key is not None else None
        self._client = SharedClient(self.address, api_key=api_key, max_retries=self.max_retries)

    @classmethod
    def class_name(cls) -> str:
        return "RachisLLM"

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(
            context_window=self.context_window,
            num_output=self.max_tokens,
            model_name=self.model_name,
            is_chat_model=True,
        )

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return self._client.wait(self._whole(prompt, kwargs))

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return await self._whole(prompt, kwargs)

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        return self._client.each(self._pieces(prompt, kwargs))

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        return self._pieces(prompt, kwargs)

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return _chat(self._client.wait(self._whole(_turns(messages), kwargs)))

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return _chat(await self._whole(_turns(messages), kwargs))

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        pieces = self._client.each(self._pieces(_turns(messages), kwargs))
        return (_chat(piece) for piece in pieces)

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        pieces = self._pieces(_turns(messages), kwargs)
        return (_chat(piece) async for piece in pieces)

    async def _whole(self, prompt: Prompt, given: dict[str, Any]) -> CompletionResponse:
        found = CompletionResponse(text="")
        async with aclosing(self._pieces(prompt, given)) as pieces:
            async for piece in pieces:
                found = piece
        return found.model_copy(update={"delta": None})

    async def _pieces(self, prompt: Prompt, given: dict[str, Any]) -> AsyncGenerator[CompletionResponse, None]:
        """Each with the text so far; the last one, with what was used, adds none."""
        wishes = {"temperature": self.temperature, "max_tokens": self.max_tokens, **self.sampling, **given}
        text = ""
        stream = self._client.here().stream(prompt, timeout_s=self.timeout_s, **wishes)
        async with aclosing(stream) as pieces:
            async for piece in pieces:
                if isinstance(piece, generation.Completion):
                    yield CompletionResponse(text=text, delta="", additional_kwargs=_used(piece))
                else:
                    text += piece.text
                    yield CompletionResponse(text=text, delta=piece.text)


class SessionQueryEngine(CustomQueryEngine):
    """Answers a question from what retrievers find. All search at once, and each node is computed once it is found.

    prefix: before the nodes, text or chat messages, of which the last one stays open for them. closing: from the
    question, what comes behind them. sampling: fields of `SamplingParams`. api_key: as of `rachis.AsyncClient`. Raises
    what a retriever raises, and as `rachis.AsyncSession`.
    """

    address: str
    retrievers: list[BaseRetriever]
    prefix: str | list[dict[str, str]] = ""
    closing: Callable[[str], str] = "\nQuestion: {}\nAnswer:".format
    sampling: dict[str, Any] = Field(default_factory=dict)
    timeout_s: float = DEFAULT_TIMEOUT_S
    api_key: SecretStr | None = None
    _client: SharedClient = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        super().model_post_init(context)
        api_key = self.api_key.get_secret_value() if self.api_key is not None else None
        self._client = SharedClient(self.address, api_key=api_key)

    def custom_query(self, query_str: str) -> Response:
        return self._client.wait(self.acustom_query(query_str))

    async def acustom_query(self, query_str: str) -> Response:
        nodes: list[NodeWithScore] = []

        async def found_by(retriever: BaseRetriever) -> list[NodeWithScore]:
            found = await retriever.aretrieve(query_str)
            nodes.extend(found)
            return found

        session = self._client.here().session(self.prefix, timeout_s=self.timeout_s, **self.sampling)
        searches = [found_by(retriever) for retriever in self.retrievers]
        async with aclosing(answer_from(session, searches, self.closing(query_str))) as deltas:
            text = "".join([delta.text async for delta in deltas])
        return Response(text, source_nodes=nodes, metadata=_used(session.completion))


def _turns(messages: Sequence[ChatMessage]) -> list[dict[str, str]]:
    turns = []
    for number, message in enumerate(messages):
        if message.role not in _ROLES:
            raise InvalidInputError.local("tools and their calls are the HTTP API's", field=f"messages[{number}]")
        if any(block.block_type != "text" for block in message.blocks):
            raise InvalidInputError.local("is not text alone", field=f"messages[{number}].content")
        turns.append({"role": _ROLES[message.role], "content": message.content or ""})
    return turns


def _chat(response: CompletionResponse) -> ChatResponse:
    return ChatResponse(
        message=ChatMessage(role=MessageRole.ASSISTANT, content=response.text),
        delta=response.delta,
        additional_kwargs=response.additional_kwargs,
    )


def _used(completion: generation.Completion) -> dict[str, Any]:
    usage = completion.usage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
    }
