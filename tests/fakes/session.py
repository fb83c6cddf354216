"""The fake engine's sessions: input is taken in and computed in ticks of the event loop, so progress can be watched.

As in the real engine the last token waits for the end of the input. `FakeEngine.compute_at_most` and `hold_inputs`
stop a session where a test wants it.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Protocol

from cluster_core.clock import monotonic_s
from cluster_core.engine_jobs import (
    EngineJob,
    EngineOutput,
    SessionEvent,
    SessionEventKind,
    SessionMode,
    SessionProgress,
    SessionRecord,
)
from cluster_core.errors import InvalidInputError, OutOfOrderError, OutOfRangeError, RachisError, UnavailableError

TOKENS_PER_TICK = 8


@dataclass(slots=True, eq=False)
class FakeRun:
    """What runs under one name: a job or a session."""

    blocks: int
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    ended_by: RachisError | None = None


class SessionEngine(Protocol):
    """What a session needs of the engine that it is open on."""

    inputs_held: bool
    max_model_len: int

    def forget(self, name: str, run: FakeRun) -> None: ...

    def run_job(self, job: EngineJob, run: FakeRun) -> AsyncIterator[EngineOutput]: ...

    def blocks_of(self, tokens: int) -> int: ...

    def take_budget(self, wanted: int) -> int: ...


class FakeSession:
    """See `cluster_core.engine.EngineSession`."""

    def __init__(self, engine: SessionEngine, job: EngineJob, mode: SessionMode, run: FakeRun) -> None:
        self.job = job
        self.mode = mode
        # The prompt as its caller knows it, and the inputs that the engine has not taken in yet.
        self._told = list(job.token_ids)
        self.pending: deque[tuple[list[int], bool]] = deque()
        self._prompt = list(job.token_ids)
        self._ready = 0
        self._finished = False
        self._closed = False
        self._engine = engine
        self._run = run
        self._opened_s = monotonic_s()
        self._progress = SessionProgress(received_tokens=len(self._told), prompt_tokens=len(self._told))
        self._seen = self._progress
        self._events = [self._event(SessionEventKind.QUEUED, len(self._told))]
        self._changed = asyncio.Event()
        self._task = asyncio.create_task(self._work())

    @property
    def told_tokens(self) -> int:
        """Length of the prompt with all that has come, taken in or not."""
        return len(self._told)

    def append(self, token_ids: Sequence[int]) -> None:
        self._check_open(len(self._told) + len(token_ids))
        self._told += token_ids
        self._take([*token_ids], False)

    def update(self, token_ids: Sequence[int]) -> None:
        if self.mode is SessionMode.APPEND:
            raise OutOfOrderError("a session in APPEND mode takes no update")
        self._check_open(len(token_ids))
        self._told = [*token_ids]
        self._take([*token_ids], True)

    def finish(self, token_ids: Sequence[int] = ()) -> AsyncIterator[EngineOutput]:
        self._check_open(len(self._told) + len(token_ids))
        if not self._told and not token_ids:
            raise InvalidInputError("the prompt is empty")
        self._told += token_ids
        self._finished = True
        self.pending.append(([*token_ids], False))
        self._wake()
        return self._generate(replace(self.job, token_ids=tuple(self._told)))

    def progress(self) -> SessionProgress:
        return self._progress

    async def changed(self) -> SessionProgress:
        while self._progress == self._seen:
            self._raise_if_ended()
            self._changed.clear()
            await self._changed.wait()
        self._seen = self._progress
        return self._seen

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._task.cancel()
            self._changed.set()
            self._engine.forget(self.job.request_id, self._run)

    async def _generate(self, job: EngineJob) -> AsyncIterator[EngineOutput]:
        try:
            while self.pending or self._ready < len(self._prompt):
                self._raise_if_ended()
                self._changed.clear()
                await self._changed.wait()
            self._events.append(self._event(SessionEventKind.FINISHED, len(self._prompt)))
            async with aclosing(self._engine.run_job(job, self._run)) as outputs:  # type: ignore[type-var]
                output: EngineOutput
                async for output in outputs:
                    ended = output.finish_reason is not None
                    yield replace(output, session=self._record()) if ended else output
        finally:
            self.close()

    async def _work(self) -> None:
        """One tick takes in what has come and computes some tokens of it."""
        while self._run.ended_by is None:
            await asyncio.sleep(0)
            self._take_in()
            if not self._compute():
                await self._run.wake.wait()
                self._run.wake.clear()
        self._changed.set()

    def _take_in(self) -> None:
        while self.pending and not self._engine.inputs_held:
            tokens, replaces = self.pending.popleft()
            common = _common_prefix(self._prompt, tokens) if replaces else len(self._prompt)
            lost = max(0, self._ready - common)
            if lost:
                self._events.append(self._event(SessionEventKind.INVALIDATED, lost))
            self._ready -= lost
            self._prompt = tokens if replaces else self._prompt + tokens
            self._run.blocks = self._engine.blocks_of(len(self._prompt) + self.job.sampling.max_tokens)
            told = self._progress
            closes = self._finished and not self.pending
            self._note(
                received_tokens=told.received_tokens + len(tokens),
                reused_tokens=told.reused_tokens + (self._ready if replaces else 0),
                invalidated_tokens=told.invalidated_tokens + lost,
                prompt_tokens=len(self._prompt),
                inputs=told.inputs + (not closes),
            )

    def _compute(self) -> bool:
        """False when there is nothing to compute, or nothing may be."""
        wanted = len(self._prompt) if self._finished else max(0, len(self._prompt) - 1)
        count = self._engine.take_budget(min(TOKENS_PER_TICK, wanted - self._ready))
        if count <= 0:
            return False
        self._ready += count
        self._note(computed_tokens=self._progress.computed_tokens + count)
        if self._ready == wanted:
            self._events.append(self._event(SessionEventKind.KV_ON_DEVICE, self._ready))
        return True

    def _note(self, **values: int) -> None:
        self._progress = replace(self._progress, ready_tokens=self._ready, **values)
        self._changed.set()

    def _record(self) -> SessionRecord:
        return SessionRecord(self._progress, events=tuple(self._events))

    def _event(self, kind: SessionEventKind, tokens: int) -> SessionEvent:
        return SessionEvent(kind, monotonic_s() - self._opened_s, tokens)

    def _take(self, tokens: list[int], replaces: bool) -> None:
        self.pending.append((tokens, replaces))
        self._wake()

    def _wake(self) -> None:
        self._run.wake.set()

    def _check_open(self, prompt_tokens: int) -> None:
        if self._finished or self._closed:
            raise OutOfOrderError("the session takes no more input")
        limit = self._engine.max_model_len - self.job.sampling.max_tokens
        if prompt_tokens > limit:
            raise OutOfRangeError(f"the prompt would have {prompt_tokens} tokens, the limit is {limit}")

    def _raise_if_ended(self) -> None:
        if self._run.ended_by is not None:
            raise self._run.ended_by
        if self._closed:
            raise UnavailableError("the session was closed")


def _common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(first), len(second)))
