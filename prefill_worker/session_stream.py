"""One session's stream at the prefill worker: inputs go to the engine as they come, progress goes back meanwhile.

The stream has one reader and one writer, under one TaskGroup. Progress is never queued: a report says where the
session stands when it is written, at most once per interval.
"""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing

from rachis import conventions
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire

from cluster_core.engine import EngineSession
from cluster_core.engine_jobs import EngineOutput, SessionMode
from cluster_core.errors import DrainingError, InvalidInputError, OutOfOrderError, UnavailableError, Ungrouped
from cluster_wire import calls
from cluster_wire.calls import Context
from worker_runtime.wire_conversion import to_wire


class SessionStream:
    """What follows `open`. `prompt` is the prompt that the session was opened with.

    moves: set when a session that still takes input is to go on at another worker.
    """

    def __init__(
        self,
        session: EngineSession,
        mode: SessionMode,
        context: Context,
        progress_interval_s: float,
        prompt: Sequence[int],
        moves: asyncio.Event,
    ) -> None:
        self._session = session
        self._context = context
        self._progress_interval_s = progress_interval_s
        # Where updates are taken: they say by a count what of the prompt they keep.
        self._prompt = list(prompt) if mode is SessionMode.UPDATE else None
        self._finished = False
        self._moves = moves

    async def run(self) -> EngineOutput:
        """The job's last output.

        Raises what the engine refuses, InvalidInputError and OutOfOrderError for what never reaches it, DrainingError
        when the session moves, and UnavailableError when the engine dies.
        """
        with Ungrouped():
            return await self._run()

    async def _run(self) -> EngineOutput:
        async with asyncio.TaskGroup() as tasks:
            output = tasks.create_task(self._take_input())
            moving = tasks.create_task(self._give_back())
            await self._report_progress(output, tasks)
            moving.cancel()
        return output.result()

    async def _give_back(self) -> None:
        await self._moves.wait()
        if not self._finished:
            raise DrainingError("the worker is draining: the session goes on at another one")

    async def _take_input(self) -> EngineOutput:
        while (request := await conventions.next_message(self._context)) is not None:
            kind = request.WhichOneof("event")
            if kind == "append":
                self._append(request.append.token_ids)
            elif kind == "update":
                self._update(request.update)
            elif kind == "finish":
                return await self._finish(request.finish.token_ids)
            else:
                raise InvalidInputError("must be append, update or finish", field="event")
        raise OutOfOrderError("the stream was closed before `finish`")

    def _append(self, token_ids: Sequence[int]) -> None:
        self._session.append(token_ids)
        if self._prompt is not None:
            self._prompt += token_ids

    def _update(self, update: wire.PrefillSessionUpdate) -> None:
        if self._prompt is None:
            raise OutOfOrderError("a session in APPEND mode takes no update", field="update")
        if update.keep_tokens > len(self._prompt):
            raise InvalidInputError(f"the prompt has {len(self._prompt)} tokens", field="update.keep_tokens")
        prompt = self._prompt[: update.keep_tokens] + list(update.token_ids)
        self._session.update(prompt)
        self._prompt = prompt

    async def _finish(self, token_ids: Sequence[int]) -> EngineOutput:
        outputs = self._session.finish(token_ids)
        self._finished = True
        async with aclosing(outputs) as outputs:  # type: ignore[type-var]
            output: EngineOutput
            async for output in outputs:
                if output.finish_reason is not None:
                    return output
        raise AssertionError("a job ends with a finish reason")

    async def _report_progress(self, output: asyncio.Task[EngineOutput], tasks: asyncio.TaskGroup) -> None:
        """Until the output is there. Raises UnavailableError when the engine dies before `finish`."""
        reported = None
        while not output.done():
            progress = self._session.progress()
            if progress != reported:
                message = wire.PrefillSessionResponse(progress=to_wire(progress, generation.SessionProgress))
                await calls.write(self._context, message)
                reported = progress
                await asyncio.wait({output}, timeout=self._progress_interval_s)
            else:
                changed = tasks.create_task(self._changed(output))
                await asyncio.wait({output, changed}, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()

    async def _changed(self, output: asyncio.Task[EngineOutput]) -> None:
        try:
            await self._session.changed()
        except UnavailableError:
            if not self._finished:
                raise
            # The job's own end says why.
            await asyncio.wait({output})
