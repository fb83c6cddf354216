"""Reads what a session's client sends, one message at a time, and no more of it than the engine keeps up with.

Not reading is what slows the client: gRPC's flow control stops it. A message that is refused is answered and changes
nothing. The wait for the client's next message is bounded; while the session itself keeps the client waiting, only the
request's deadline counts. A cancelled call ends the reader wherever it is.
"""

import asyncio
from collections.abc import Awaitable, Callable

from rachis import conventions

from cluster_core.errors import ClientFault, DeadlineError, WithdrawnError
from cluster_wire.calls import Context
from control_plane.sessions.intake import Message, SessionIntake
from control_plane.sessions.session import Command


async def next_message(context: Context, timeout_s: float, limit: str = "streaming.idle_timeout_s") -> Message | None:
    """None when the client has closed its side. Raises DeadlineError when it stays silent. limit: whose bound it is."""
    try:
        async with asyncio.timeout(timeout_s):
            message: Message | None = await conventions.next_message(context)
            return message
    except TimeoutError:
        raise DeadlineError(f"no input came for {timeout_s:g} s, the limit is {limit}", field="event") from None


class SessionReader:
    """What follows `open`, message by message."""

    def __init__(
        self,
        context: Context,
        intake: SessionIntake,
        room: asyncio.Event,
        send: Callable[[Command | None], None],
        refuse: Callable[[ClientFault, int], Awaitable[None]],
        *,
        idle_timeout_s: float,
    ) -> None:
        """room: set while a message may be read. send: gets what each one says to the worker. refuse: gets the error
        and the number of the message."""
        self._context = context
        self._intake = intake
        self._session = intake.session
        self._send = send
        self._refuse = refuse
        self._idle_timeout_s = idle_timeout_s
        self._room = room
        # Of the client's messages so far; `open` is number 1.
        self.messages = 1

    async def run(self) -> None:
        """Returns when the client has closed its side after `finish`.

        Raises WithdrawnError when it cancels or closes its side before, DeadlineError when it stays silent.
        """
        while (message := await self._next()) is not None:
            self.messages += 1
            try:
                self._send(await self._intake.take(message))
            except ClientFault as error:
                await self._refuse(error, self.messages)
        if not self._session.finished:
            raise WithdrawnError("the client closed its side of the stream before `finish`")

    async def _next(self) -> Message | None:
        await self._room.wait()
        if self._session.finished:
            message: Message | None = await conventions.next_message(self._context)
            return message
        return await next_message(self._context, self._idle_timeout_s)
