"""What wakes the tasks of one session: its input or its backlog has changed."""

import asyncio
from collections.abc import Callable

from control_plane.sessions.backlog import Backlog
from control_plane.sessions.session import Session


class SessionChanges:
    """`note` after each change."""

    def __init__(self, session: Session, backlog: Backlog, on_idle: Callable[[], None] = lambda: None) -> None:
        """on_idle: called when the session waits for its client, who has not finished it."""
        self._session = session
        self._backlog = backlog
        self._on_idle = on_idle
        # Set by each change; cleared by the task that tells the client of progress.
        self.news = asyncio.Event()
        # Set while the client's next message may be read.
        self.room = asyncio.Event()
        self._look_for_room()

    def note(self) -> None:
        self.news.set()
        self._look_for_room()
        if self._backlog.is_idle and not self._session.finished:
            self._on_idle()

    def _look_for_room(self) -> None:
        if self._session.finished or self._backlog.has_room:
            self.room.set()
        else:
            self.room.clear()
