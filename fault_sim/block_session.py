"""A session of a `BlockEngine`: input is taken in between two steps, and changes the prompt of its run."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING

from cluster_core.clock import monotonic_s
from cluster_core.engine_jobs import (
    EngineOutput,
    SessionEvent,
    SessionEventKind,
    SessionMode,
    SessionProgress,
    SessionRecord,
)
from cluster_core.errors import InvalidInputError, OutOfOrderError, OutOfRangeError, UnavailableError
from fault_sim.block_run import Run

if TYPE_CHECKING:
    from fault_sim.block_engine import BlockEngine


class BlockSession:
    """See `cluster_core.engine.EngineSession`. The engine calls `take_in`, `computed`, `preempted` and `fail`."""

    def __init__(self, engine: "BlockEngine", run: Run, mode: SessionMode) -> None:
        self._engine = engine
        self._run = run
        self._mode = mode
        # The length of the prompt with all that has come, and what of that was not taken in: tokens, and whether they
        # replace it.
        self._told_tokens = len(run.tokens)
        self._pending: deque[tuple[list[int], bool]] = deque()
        self._is_finished = self._is_closed = False
        self._error: Exception | None = None
        self._opened_s = monotonic_s()
        self._progress = SessionProgress(received_tokens=self._told_tokens, prompt_tokens=self._told_tokens)
        self._seen = self._progress
        self._preemptions = 0
        self._events = [self._event(SessionEventKind.QUEUED, self._told_tokens)]
        self._news = asyncio.Event()

    def append(self, token_ids: Sequence[int]) -> None:
        self._check(self._told_tokens + len(token_ids))
        self._told_tokens += len(token_ids)
        self._put([*token_ids], replaces=False)

    def update(self, token_ids: Sequence[int]) -> None:
        if self._mode is SessionMode.APPEND:
            raise OutOfOrderError("a session in APPEND mode takes no update")
        self._check(len(token_ids))
        self._told_tokens = len(token_ids)
        self._put([*token_ids], replaces=True)

    def finish(self, token_ids: Sequence[int] = ()) -> AsyncIterator[EngineOutput]:
        self._check(self._told_tokens + len(token_ids))
        if not self._told_tokens and not token_ids:
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

    # What the engine does to it, between two steps.

    def take_in(self) -> bool:
        """Whether there was any input."""
        had_input = bool(self._pending)
        while self._pending:
            tokens, replaces = self._pending.popleft()
            run, told = self._run, self._progress
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
            self._tell(
                received_tokens=told.received_tokens + len(tokens),
                reused_tokens=told.reused_tokens + (run.computed if replaces else 0),
                invalidated_tokens=told.invalidated_tokens + lost,
                prompt_tokens=len(run.tokens),
                inputs=told.inputs + (not closes),
            )
        return had_input

    def computed(self, tokens: int, *, cached: int = 0) -> None:
        """So much more of the prompt lies in blocks."""
        told = self._progress
        self._tell(computed_tokens=told.computed_tokens + tokens, reused_tokens=told.reused_tokens + cached)
        if self._run.computed == self._run.wanted:
            self._events.append(self._event(SessionEventKind.KV_ON_DEVICE, self._run.computed))
            if not self._run.is_open:
                self._events.append(self._event(SessionEventKind.FINISHED, self._run.computed))

    def preempted(self) -> None:
        self._preemptions += 1
        self._events.append(self._event(SessionEventKind.PREEMPTED_RECOMPUTE, self._progress.ready_tokens))
        self._tell()

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

    def _tell(self, **values: int) -> None:
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
