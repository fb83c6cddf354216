"""LangChain: a chat model, and a runnable that answers from retrievers while they search (`rachis-client[langchain]`).

chat = ChatRachis(address="127.0.0.1:7421", temperature=0.0, max_tokens=64)
answer = SessionAnswer(address="127.0.0.1:7421", retrievers=[wiki, mail], prefix="Answer from these pages.")
for text in answer.stream("Who was it?"): ...
"""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableConfig, RunnableSerializable
from pydantic import Field, PrivateAttr, SecretStr

from rachis.client import DEFAULT_TIMEOUT_S, Generated
from rachis.errors import InvalidInputError
from rachis.requests import wished
from rachis.retrieval import answer_from
from rachis.shared_client import SharedClient
from rachis.v1 import generation_pb2 as generation

_ROLES = {"human": "user", "ai": "assistant", "system": "system"}
_REASONS = {generation.FINISH_REASON_STOP: "stop", generation.FINISH_REASON_LENGTH: "length"}


class ChatRachis(BaseChatModel):
    """A chat over gRPC, streamed or not. What a call is given beside `stop` goes over `sampling`.

    sampling: further fields of `SamplingParams`. api_key, max_retries: as of `rachis.AsyncClient`. Messages are text;
    tools are the HTTP API's. Raises RachisError, InvalidInputError.
    """

    address: str
    temperature: float | None = None
    max_tokens: int | None = None
    sampling: dict[str, Any] = Field(default_factory=dict)
    timeout_s: float = DEFAULT_TIMEOUT_S
    api_key: SecretStr | None = None
    max_retries: int = 2
    _client: SharedClient = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        super().model_post_init(context)
        api_key = self.api_key.get_secret_value() if self.api_key is not None else None
        self._client = SharedClient(self.address, api_key=api_key, max_retries=self.max_retries)

    @property
    def _llm_type(self) -> str:
        return "rachis"

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        return {"address": self.address, **self._wishes(None, {})}

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return self._client.wait(self._agenerate(messages, stop, None, **kwargs))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        answer = await self._client.here().generate(
            _turns(messages), timeout_s=self.timeout_s, **self._wishes(stop, kwargs)
        )
        return ChatResult(generations=[ChatGeneration(message=_message(answer))])

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        return self._client.each(self._astream(messages, stop, None, **kwargs))

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncGenerator[ChatGenerationChunk, None]:
        pieces = self._client.here().stream(_turns(messages), timeout_s=self.timeout_s, **self._wishes(stop, kwargs))
        async with aclosing(pieces) as stream:
            async for piece in stream:
                if isinstance(piece, generation.Completion):
                    said = AIMessageChunk(
                        content="", usage_metadata=_usage(piece), response_metadata=_told(piece), chunk_position="last"
                    )
                else:
                    said = AIMessageChunk(content=piece.text)
                yield ChatGenerationChunk(message=said)

    def _wishes(self, stop: list[str] | None, given: Mapping[str, Any]) -> dict[str, Any]:
        own = {"temperature": self.temperature, "max_tokens": self.max_tokens, "stop": stop}
        return wished(self.sampling, own, given)


class SessionAnswer(RunnableSerializable[str, str]):
    """Answers a question from what retrievers find. All search at once, and each document is computed once it is found.

    prefix: before the documents, text or chat messages, of which the last one stays open for them. closing: from the
    question, what comes behind them. sampling: fields of `SamplingParams`. api_key: as of `rachis.AsyncClient`. The
    answer's text is streamed. Raises what a retriever raises, and as `rachis.AsyncSession`.
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

    def invoke(self, input: str, config: RunnableConfig | None = None, **kwargs: Any) -> str:
        return "".join(self.stream(input, config, **kwargs))

    async def ainvoke(self, input: str, config: RunnableConfig | None = None, **kwargs: Any) -> str:
        return "".join([text async for text in self.astream(input, config, **kwargs)])

    def stream(self, input: str, config: RunnableConfig | None = None, **kwargs: Any) -> Iterator[str]:
        return self._client.each(self._texts(input, config, kwargs))

    async def astream(self, input: str, config: RunnableConfig | None = None, **kwargs: Any) -> AsyncIterator[str]:
        async with aclosing(self._texts(input, config, kwargs)) as texts:
            async for text in texts:
                yield text

    async def _texts(self, question: str, config: RunnableConfig | None, given: Mapping[str, Any]) -> Any:
        session = self._client.here().session(self.prefix, timeout_s=self.timeout_s, **(self.sampling | dict(given)))
        searches = [retriever.ainvoke(question, config) for retriever in self.retrievers]
        async with aclosing(answer_from(session, searches, self.closing(question))) as deltas:
            async for delta in deltas:
                yield delta.text


def _turns(messages: Sequence[BaseMessage]) -> list[dict[str, str]]:
    turns = []
    for number, message in enumerate(messages):
        field = f"messages[{number}]"
        role = _ROLES.get(message.type.removesuffix("MessageChunk").lower())
        if role is None or getattr(message, "tool_calls", None):
            raise InvalidInputError.local("tools and their calls are the HTTP API's", field=field)
        blocks = [message.content] if isinstance(message.content, str) else message.content
        texts = [block if isinstance(block, str) else block.get("text") for block in blocks]
        if not all(isinstance(text, str) for text in texts):
            raise InvalidInputError.local("is not text alone", field=f"{field}.content")
        turns.append({"role": role, "content": "".join(map(str, texts))})
    return turns


def _message(answer: Generated) -> AIMessage:
    told = answer.completion
    return AIMessage(content=answer.text, usage_metadata=_usage(told), response_metadata=_told(told))


def _usage(completion: generation.Completion) -> UsageMetadata:
    usage = completion.usage
    return UsageMetadata(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        input_token_details=InputTokenDetails(cache_read=usage.cached_tokens),
    )


def _told(completion: generation.Completion) -> dict[str, Any]:
    return {
        "finish_reason": _REASONS.get(completion.finish_reason, ""),
        "model_provider": "rachis",
        "prefill_worker_id": completion.route.prefill_worker_id,
        "decode_worker_id": completion.route.decode_worker_id,
    }
