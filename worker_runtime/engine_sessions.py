"""The two ends of a session in one engine: `SessionHandle` on the asyncio loop, `SessionPrompt` on the engine thread.

The handle checks what it is given and never waits: input goes to the thread as commands, which carries them out between
two steps. The prompt's request lives in the streaming scheduler (`prefill_worker.engine_scheduler`); the engine's front
end hears of it when the input is closed, because nothing is sampled before.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from cluster_core.clock import monotonic_s
from cluster_core.engine_jobs import EngineJob, EngineOutput, SessionMode, SessionProgress, SessionRecord
from cluster_core.errors import InvalidInputError, OutOfOrderError, OutOfRangeError, UnavailableError
from kv_transfer import vllm_private


class SessionHandle:
    """See `cluster_core.engine.EngineSession`."""

    def __init__(
        self,
        prompt_tokens: int,
        max_prompt_tokens: int,
        *,
        extend: Callable[[Sequence[int]], None],
        replace: Callable[[Sequence[int]], None],
        finish: Callable[[Sequence[int]], AsyncIterator[EngineOutput]],
        abandon: Callable[[], None],
    ) -> None:
        self._prompt_tokens = prompt_tokens
        self._max_prompt_tokens = max_prompt_tokens
        self._extend, self._replace, self._finish, self._abandon = extend, replace, finish, abandon
        self._progress = SessionProgress(received_tokens=prompt_tokens, prompt_tokens=prompt_tokens)
        self._changed = asyncio.Event()
        self._failure: Exception | None = None
        self._closed = False
        # The engine thread's own: what it has reported last.
        self.reported: SessionProgress | None = None

    def append(self, token_ids: Sequence[int]) -> None:
        self._check_open()
        self._prompt_tokens = self._fitting(self._prompt_tokens + len(token_ids))
        self._extend(tuple(token_ids))

    def update(self, token_ids: Sequence[int]) -> None:
        self._check_open()
        self._prompt_tokens = self._fitting(len(token_ids))
        self._replace(tuple(token_ids))

    def finish(self, token_ids: Sequence[int] = ()) -> AsyncIterator[EngineOutput]:
        self._check_open()
        total = self._fitting(self._prompt_tokens + len(token_ids))
        if not total:
            raise InvalidInputError("must not be empty", field="prompt")
        self._closed = True
        return self._finish(tuple(token_ids))

    def progress(self) -> SessionProgress:
        return self._progress

    async def changed(self) -> SessionProgress:
        await self._changed.wait()
        if self._failure is not None:
            raise self._failure
        self._changed.clear()
        return self._progress

    def close(self) -> None:
        self._closed = True
        if self._failure is None:
            self.fail(UnavailableError("the session was closed"))
            self._abandon()

    # Called on the loop, on behalf of the engine thread.

    def report(self, progress: SessionProgress) -> None:
        self._progress = progress
        self._changed.set()

    def fail(self, error: Exception) -> None:
        self._closed = True
        self._failure = self._failure or error
        self._changed.set()

    def _check_open(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise OutOfOrderError("is finished and takes no more input", field="session")

    def _fitting(self, prompt_tokens: int) -> int:
        if prompt_tokens > self._max_prompt_tokens:
            raise OutOfRangeError(
                f"would have {prompt_tokens} tokens, the limit is {self._max_prompt_tokens}", field="prompt"
            )
        return prompt_tokens


class SessionPrompt:
    """A session's request in the engine. Everything here runs on the engine thread, between two steps."""

    def __init__(self, engine: Any, job: EngineJob, mode: SessionMode, params: Any, adapter: Any) -> None:
        """adapter: vLLM's request for it, or None."""
        from vllm.v1.request import Request

        from worker_runtime.vllm_conversion import prompt_of, trace_headers

        self._engine = engine
        self._scheduler = vllm_private.scheduler_of(engine)
        # vLLM checks the parameters together with a prompt, which must not be empty.
        placeholder = {} if job.token_ids else {"prompt_token_ids": [0]}
        more = {"lora_request": adapter, "trace_headers": trace_headers(job)}
        self._core_request = vllm_private.core_request(
            engine, job.request_id, prompt_of(job) | placeholder, params, **more
        )
        self._core_request.prompt_token_ids = list(job.token_ids)
        self._core_request.priority = job.priority
        self.internal_id: str = self._core_request.request_id
        self.length = len(job.token_ids)
        self.closed_s = 0.0
        request = Request.from_engine_core_request(self._core_request, vllm_private.block_hasher(engine))
        vllm_private.start_grammar(engine, request)
        self._scheduler.open_session(request, mode)

    def take_in(self, token_ids: Sequence[int], *, replaces: bool) -> None:
        change = self._scheduler.replace_prompt if replaces else self._scheduler.extend_prompt
        change(self.internal_id, token_ids)

    def close(self, token_ids: Sequence[int]) -> None:
        """The prompt is complete: from now on the engine may answer."""
        self.closed_s = monotonic_s()
        prompt = self._scheduler.close_input(self.internal_id, token_ids)
        self.length = len(prompt)
        self._core_request.prompt_token_ids = prompt
        vllm_private.expect_outputs(self._engine, self._core_request)

    def progress(self) -> SessionProgress | None:
        """How far it is; the same object as before where nothing has changed, None once it has ended."""
        ledger = self._scheduler.session_ledger(self.internal_id)
        return ledger.tokens if ledger is not None else None

    def cached_tokens(self) -> int:
        """Prompt tokens that the prefix cache had, and not from this session; known with the first output."""
        cached: int = self._scheduler.session_cached_tokens(self.internal_id)
        return cached

    def abort(self) -> None:
        if self.closed_s:
            self._engine.abort_request([self.internal_id], internal=True)
        else:
            self._engine.engine_core.abort_requests([self.internal_id])

    def take_record(self) -> SessionRecord | None:
        record: SessionRecord | None = self._scheduler.take_session_record(self.internal_id)
        return record
