"""A session of a `BlockEngine`: input is taken in between two steps, and changes the prompt of its run."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
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
from cluster_core.errors import InvalidInputError, OutOfOrderError, OutOfRangeError, UnavailableError
from fault_sim.blocks.content import BlockContent
from fault_sim.blocks.run import Run


class SessionEngine(Protocol):
    """What a session needs of its engine."""

    content: BlockContent

    def longest_prompt(self, job: EngineJob) -> int: ...

    def wake(self) -> None:
        """There is something to do."""
        ...

    def leave(self, run: Run) -> None:
        """The run's caller has gone."""
        ...

    def outputs(self, run: Run) -> AsyncIterator[EngineOutput]: ...


class BlockSession:
    """See `cluster_core.engine.EngineSession`. The engine calls what `RunSession` has."""

    def __init__(self, engine: SessionEngine, run: Run, mode: SessionMode) -> None:
        self.mode = mode
        self._engine = engine
        self._run = run
        self._received_tokens = len(run.tokens)
        # Input that was not taken in yet: tokens, and whether they replace the prompt.
        self._pending: deque[tuple[list[int], bool]] = deque()
        self._is_finished = self._is_closed = False
        self._error: Exception | None = None
        self._opened_s = monotonic_s()
        self._progress = SessionProgress(received_tokens=self._received_tokens, prompt_tokens=self._received_tokens)
        self._seen = self._progress
        self._preemptions = 0
        self._events = [self._event(SessionEventKind.QUEUED, self._received_tokens)]
        self._news = asyncio.Event()

    @property
    def job(self) -> EngineJob:
        return self._run.job

    @property
    def received_tokens(self) -> int:
        """The length of the prompt with all that has come, taken in or not."""
        return self._received_tokens

    @property
    def waiting_inputs(self) -> int:
        """Inputs that were not taken in yet."""
        return len(self._pending)

    def append(self, token_ids: Sequence[int]) -> None:
        self._check(self._received_tokens + len(token_ids))
        self._received_tokens += len(token_ids)
        self._put([*token_ids], replaces=False)

    def update(self, token_ids: Sequence[int]) -> None:
        if self.mode is SessionMode.APPEND:
            raise OutOfOrderError("a session in APPEND mode takes no update")
        self._check(len(token_ids))
        self._received_tokens = len(token_ids)
        self._put([*token_ids], replaces=True)

    def finish(self, token_ids: Sequence[int] = ()) -> AsyncIterator[EngineOutput]:
        self._check(self._received_tokens + len(token_ids))
        if not self._received_tokens and not token_ids:
            raise InvalidInputError("the prompt is empty")
        self._is_finished = True
        self._put([*token_ids], replaces=False)
        return self._answer()

    def progress(self) -> SessionProgress:
        return self._progress

    async def changed(self) -> SessionProgress:
        while self._progress == self._seen:
            if self._error is not None or self._is_closed:
                raise self._error or UnavailableError("the session was closed")
            self._news.clear()
            await self._news.wait()
        self._seen = self._progress
        return self._seen

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._news.set()
            self._engine.leave(self._run)

    # For its engine, between two steps; see `RunSession`.

    def take_in(self) -> bool:
        had_input = bool(self._pending)
        while self._pending:
            tokens, replaces = self._pending.popleft()
            run, known = self._run, self._progress
            before = run.computed
            if replaces:
                self._engine.content.replace_prompt(run, tokens)
            else:
                run.tokens += tokens
            run.prompt_tokens = len(run.tokens)
            lost = before - run.computed
            if lost:
                self._events.append(self._event(SessionEventKind.INVALIDATED, lost))
            closes = self._is_finished and not self._pending
            run.is_open = not closes
            self._note(
                received_tokens=known.received_tokens + len(tokens),
                reused_tokens=known.reused_tokens + (run.computed if replaces else 0),
                invalidated_tokens=known.invalidated_tokens + lost,
                prompt_tokens=len(run.tokens),
                inputs=known.inputs + (not closes),
            )
        return had_input

    def computed(self, tokens: int, *, cached: int = 0) -> None:
        known = self._progress
        self._note(computed_tokens=known.computed_tokens + tokens, reused_tokens=known.reused_tokens + cached)
        if self._run.computed == self._run.wanted:
            self._events.append(self._event(SessionEventKind.KV_ON_DEVICE, self._run.computed))
            if not self._run.is_open:
                self._events.append(self._event(SessionEventKind.FINISHED, self._run.computed))

    def preempted(self) -> None:
        self._preemptions += 1
        self._events.append(self._event(SessionEventKind.PREEMPTED_RECOMPUTE, self._progress.ready_tokens))
        self._note()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._news.set()

    def record(self) -> SessionRecord:
        return SessionRecord(self._progress, preemptions_recompute=self._preemptions, events=tuple(self._events))

    async def _answer(self) -> AsyncIterator[EngineOutput]:
        try:
            async with aclosing(self._engine.outputs(self._run)) as outputs:  # type: ignore[type-var]
                output: EngineOutput
                async for output in outputs:
                    yield output
        finally:
            self.close()

    def _note(self, **values: int) -> None:
        ready = min(self._run.computed, len(self._run.tokens))
        self._progress = replace(self._progress, ready_tokens=ready, **values)
        self._news.set()

    def _event(self, kind: SessionEventKind, tokens: int) -> SessionEvent:
        return SessionEvent(kind, monotonic_s() - self._opened_s, tokens)

    def _put(self, tokens: list[int], *, replaces: bool) -> None:
        self._pending.append((tokens, replaces))
        self._engine.wake()

    def _check(self, prompt_tokens: int) -> None:
        if self._is_finished or self._is_closed:
            raise OutOfOrderError("the session takes no more input")
        if self._error is not None:
            raise self._error
        limit = self._engine.longest_prompt(self._run.job)
        if prompt_tokens > limit:
            raise OutOfRangeError(f"the prompt would have {prompt_tokens} tokens, the limit is {limit}")
