"""One session from its acceptance to its completion: a prompt that arrives in pieces, then the way of every request.

Its tasks, under one TaskGroup:
    listening   client -> session -> commands for the worker    (`reader`)
    telling     progress -> client
    the rest    dispatches the job, whose prefill talks to the worker (`prefill`), and writes its answer
"""

import asyncio
from contextlib import aclosing

from cluster_core.errors import Ungrouped
from control_plane.dispatch.dispatcher import Dispatcher
from control_plane.model.job import Job
from control_plane.sessions.backlog import Backlog
from control_plane.sessions.events import SessionEvents
from control_plane.sessions.prefill import PromptInPieces
from control_plane.sessions.reader import SessionReader
from control_plane.sessions.session import Session


class SessionRun:
    """Put together by `serving`; `serve` once."""

    def __init__(
        self,
        job: Job,
        session: Session,
        backlog: Backlog,
        pieces: PromptInPieces,
        events: SessionEvents,
        reader: SessionReader,
        news: asyncio.Event,
        *,
        progress_interval_s: float,
    ) -> None:
        self._job = job
        self._session = session
        self._backlog = backlog
        self._pieces = pieces
        self._events = events
        self._reader = reader
        self._progress_interval_s = progress_interval_s
        self._news = news

    async def serve(self, dispatcher: Dispatcher) -> None:
        """Returns when the answer has been written. Raises what ends the session before."""
        with Ungrouped():
            await self._serve(dispatcher)

    async def _serve(self, dispatcher: Dispatcher) -> None:
        async with asyncio.TaskGroup() as tasks:
            listening = tasks.create_task(self._listen())
            telling = tasks.create_task(self._tell_progress())
            if self._job.emitted:
                # What is resumed is prefilled whole, with the answer behind it.
                await self._pieces.without_worker()
                self._job.prompt_changes = False
            async with aclosing(dispatcher.run(self._job, self._pieces)) as answer:  # type: ignore[type-var]
                async for piece in answer:
                    await self._events.stop(telling)
                    await self._events.piece(piece)
            await self._events.stop(listening)

    async def _listen(self) -> None:
        await self._pieces.placed.wait()
        await self._events.accepted()
        await self._reader.run()

    async def _tell_progress(self) -> None:
        """Progress as it stands, when it has changed, at most once per interval."""
        await self._pieces.placed.wait()
        told = None
        while True:
            await self._news.wait()
            self._news.clear()
            progress = self._backlog.progress(self._session)
            if progress != told:
                await self._events.progress(progress)
                told = progress
                await asyncio.sleep(self._progress_interval_s)
