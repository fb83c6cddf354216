"""What vLLM's front takes for its engine: `AsyncLLM` as it is, over a router instead of an engine's process.

The seam is `EngineCoreClient`, one layer below `EngineClient`: detokenizing, stop strings, several choices, aborts and
vLLM's own metrics come with the front.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any
from unittest import mock

from rachis import AsyncClient
from vllm.config import LoRAConfig, VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from cluster_core.clock import monotonic_s
from control_plane.gateway.answer import Answer
from control_plane.gateway.callers import CALLER, client_of
from control_plane.gateway.sampling import wire_sampling
from control_plane.gateway.warm_prompt import CLIENT
from control_plane.model.request_trace import ParentSpan
from control_plane.tracing.traceparent import TRACEPARENT, parsed, written

TASKS = ("generate",)
_HEALTH_TIMEOUT_S = 2.0

# The caller's span, of the HTTP request that is being answered.
SPAN: ContextVar[ParentSpan | None] = ContextVar("span", default=None)
# What has failed of the HTTP request that is being answered, for whoever sends its status.
FAILURES: ContextVar[list[Exception] | None] = ContextVar("failures", default=None)


class RouterCore(EngineCoreClient):
    """See the module. client: of the routers."""

    # By the names that `AsyncLLM` looks for.
    engine_ranks_managed = (0,)

    def __init__(self, client: AsyncClient) -> None:
        self.resources = SimpleNamespace(engine_dead=False)
        self._client = client
        self._answers: dict[str, Answer] = {}
        self._outputs: asyncio.Queue[EngineCoreOutput] = asyncio.Queue()
        # vLLM's `OutputProcessor`, once there is one.
        self.processor: Any = None

    # What `AsyncLLM` calls.

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return TASKS

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        name = request.request_id
        answer = self._answers[name] = Answer(
            CLIENT.get() or _traced(client_of(CALLER.get(), self._client)),
            request,
            self._outputs.put_nowait,
            lambda tokens: self._tell_cached(name, tokens),
            lambda error: self._fail(name, error),
        )
        answer.on_end(lambda: self._answers.pop(name, None))

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        for name in request_ids:
            if name in self._answers:
                self._answers[name].stop()

    async def get_output_async(self) -> EngineCoreOutputs:
        outputs = [await self._outputs.get()]
        while not self._outputs.empty():
            outputs.append(self._outputs.get_nowait())
        return EngineCoreOutputs(outputs=outputs, timestamp=monotonic_s())

    async def reset_mm_cache_async(self) -> None:
        """Nothing is cached here."""

    def dp_engines_running(self) -> bool:
        return bool(self._answers)

    def shutdown(self, timeout: float | None = None) -> None:
        for answer in list(self._answers.values()):
            answer.stop()

    # What it does beside.

    async def is_serving(self) -> bool:
        return await self._client.is_serving(_HEALTH_TIMEOUT_S)

    def _tell_cached(self, request_id: str, tokens: int) -> None:
        """The front reads it with the first output, when nobody knows it yet."""
        state = self.processor.request_states.get(request_id)
        if state is not None:
            state.num_cached_tokens = tokens

    def _fail(self, request_id: str, error: Exception) -> None:
        """Ends a request, and its siblings where it is one of several choices, by an exception in its consumer."""
        state = self.processor.request_states.get(request_id)
        if state is None:
            return
        family = sorted(state.parent_req.child_requests) if state.parent_req is not None else [request_id]
        for name in self.processor.abort_requests(family, internal=True):
            if name != request_id and name in self._answers:
                self._answers[name].stop()
        state.queue.put(error)


class RouterEngine(AsyncLLM):
    """`AsyncLLM` over a `RouterCore`."""

    def __init__(self, config: VllmConfig, core: RouterCore, *, log_stats: bool, log_requests: bool) -> None:
        with mock.patch.object(EngineCoreClient, "make_async_mp_client", lambda *_, **__: core):
            super().__init__(config, None, log_stats=log_stats, log_requests=log_requests)
        # The router checks grammars, in a process that it may end over one: here a large one would hold all up.
        self.input_processor.structured_outputs_config = None
        # Which adapters there are the router knows; vLLM refuses all of them without a configuration.
        self.input_processor.lora_config = LoRAConfig()
        self._parses_reasoning = bool(config.structured_outputs_config.reasoning_parser)
        self._core = core
        core.processor = self.output_processor

    def __del__(self) -> None:
        """vLLM's server shuts it down when it stops; at the interpreter's end there is nothing left to call."""

    async def check_health(self) -> None:
        if not await self._core.is_serving():
            raise EngineDeadError

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncIterator[Any]:
        """As `AsyncLLM.generate`; what it raises is noted in `FAILURES`, since vLLM makes an event of it in streams."""
        # vLLM itself would drop it, for want of a collector of its own.
        SPAN.set(parsed((options.pop("trace_headers", None) or {}).get(TRACEPARENT, "")))
        try:
            refuse(prompt, sampling_params, options, parses_reasoning=self._parses_reasoning)
            outputs = super().generate(prompt, sampling_params, request_id, **options)
            async with aclosing(outputs) as stream:
                async for output in stream:
                    yield output
        except Exception as error:  # noqa: BLE001 - it goes on, whatever it is
            failure = _own(error)
            note_failure(failure)
            raise failure from failure.__cause__


def note_failure(failure: Exception) -> None:
    """Once, whoever notes it."""
    failures = FAILURES.get()
    if failures is not None and failure not in failures:
        failures.append(failure)


def _own(error: Exception) -> Exception:
    """The failure of an `Answer`: vLLM raises one without a sentence for it, and keeps it as the cause."""
    cause = error.__cause__
    return cause if isinstance(cause, EngineGenerateError) else error


def _traced(client: AsyncClient) -> AsyncClient:
    span = SPAN.get()
    return client.with_metadata([(TRACEPARENT, written(span))]) if span is not None else client


def refuse(prompt: Any, params: SamplingParams, options: dict[str, Any], *, parses_reasoning: bool) -> None:
    """Before anything is registered. Raises VLLMValidationError."""
    wire_sampling(params)
    # Where nobody has looked, as for plain completions, vLLM's engines wait for the end of a reasoning by themselves.
    has_ended = options.get("reasoning_ended")
    reasons = has_ended is False or (parses_reasoning and has_ended is None)
    if params.structured_outputs is not None and reasons:
        # An engine's grammar begins with the answer, and would leave no room for the reasoning before it.
        raise VLLMValidationError(
            "structured_outputs together with a reasoning parser is not supported by this service",
            parameter="structured_outputs",
        )
    if isinstance(prompt, dict) and prompt.get("type") not in (None, "token"):
        raise VLLMValidationError("only text prompts are supported by this service", parameter="prompt")
