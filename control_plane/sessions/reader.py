"""Reads what a session's client sends, one message at a time, and no more of it than the engine keeps up with.

Not reading is what slows the client: gRPC's flow control stops it. A message that is refused is answered and changes
nothing. The wait for the client's next message is bounded; while the session itself keeps the client waiting, only the
request's deadline counts. A cancelled call ends the reader wherever it is.
"""

import asyncio
from collections.abc import Awaitable, Callable

from rachis import wire as conventions
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import router_pb2 as api
from rachis.v1 import worker_pb2 as wire
from rachis.wire import Context

from cluster_core.errors import ClientFault, DeadlineError, InvalidInputError, OutOfOrderError, WithdrawnError
from control_plane.intake import validation
from control_plane.intake.malformed_input import Malformed
from control_plane.intake.tokenization import Tokenizer
from control_plane.sessions.backlog import Backlog
from control_plane.sessions.prefill import PromptInPieces
from control_plane.sessions.session import Input, Session

Message = api.StreamGenerateRequest | Malformed


async def next_message(context: Context, idle_timeout_s: float) -> Message | None:
    """None when the client has closed its side. Raises DeadlineError when it stays silent."""
    try:
        async with asyncio.timeout(idle_timeout_s):
            message: Message | None = await conventions.next_message(context)
            return message
    except TimeoutError:
        raise DeadlineError(
            f"no input came for {idle_timeout_s:g} s, the limit is streaming.idle_timeout_s", field="event"
        ) from None


class SessionReader:
    """What follows `open`. `refuse` is told the error and the number of the message; `open` is number 1."""

    def __init__(
        self,
        context: Context,
        session: Session,
        prefix: generation.PromptInput,
        pieces: PromptInPieces,
        backlog: Backlog,
        tokenizer: Tokenizer,
        model: wire.ModelInfo,
        refuse: Callable[[ClientFault, int], Awaitable[None]],
        *,
        idle_timeout_s: float,
    ) -> None:
        self._context = context
        self._session = session
        self._prefix = prefix
        self._pieces = pieces
        self._backlog = backlog
        self._tokenizer = tokenizer
        self._model = model
        self._refuse = refuse
        self._idle_timeout_s = idle_timeout_s
        self._room = asyncio.Event()
        self.messages = 1

    def changed(self) -> None:
        """To be called when the backlog or the session has changed."""
        if self._session.finished or self._backlog.has_room:
            self._room.set()
        else:
            self._room.clear()

    async def run(self) -> None:
        """Returns when the client has closed its side after `finish`.

        Raises WithdrawnError when it cancels or closes its side before, DeadlineError when it stays silent.
        """
        self.changed()
        while (message := await self._next()) is not None:
            self.messages += 1
            try:
                await self._take(message)
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

    async def _take(self, message: Message) -> None:
        if isinstance(message, Malformed):
            raise message.error
        kind = message.WhichOneof("event")
        if kind is None:
            raise InvalidInputError("one of append, update, finish or cancel must be set", field="event")
        if kind == "append":
            await self._append(message.append)
        elif kind == "update":
            await self._update(message.update)
        elif kind == "finish":
            await self._finish(message.finish)
        elif kind == "cancel":
            self._session.cancel()
            raise WithdrawnError("the client cancelled the session")
        else:
            raise OutOfOrderError("the session is open already", field="open")

    async def _append(self, append: api.SessionAppend) -> None:
        self._session.check(Input.APPEND)
        tokens = await self._tokens(append.piece, "append.piece")
        self._pieces.send(self._session.append(tokens))

    async def _update(self, update: api.SessionUpdate) -> None:
        self._session.check(Input.UPDATE)
        self._session.check_revision(update.revision)
        tokens: list[int] = []
        for index, piece in enumerate(update.context):
            tokens += await self._tokens(piece, f"update.context[{index}]")
        self._pieces.send(self._session.update(update.revision, tokens))

    async def _finish(self, finish: api.SessionFinish) -> None:
        self._session.check(Input.FINISH)
        closing = finish.closing
        validation.check_closing(closing, self._prefix, self._model)
        tokens: list[int] = []
        tail = None
        if closing.HasField("text"):
            tokens = await self._tokens(api.SessionPiece(text=closing.text), "finish.closing")
        elif closing.HasField("token_ids"):
            tokens = list(closing.token_ids.ids)
        elif closing.HasField("chat"):
            tail = await self._turns(closing.chat)
        self._pieces.send(self._session.finish(tokens, tail))

    async def _turns(self, turns: generation.ChatMessages) -> list[int]:
        """What stands after the context with these turns in it."""
        frame = await self._tokenizer.frame(self._prefix, turns)
        if frame.head != self._session.head:
            raise InvalidInputError(
                "the chat template puts something else before the context when these messages follow it",
                field="finish.closing.chat",
            )
        return frame.tail

    async def _tokens(self, piece: api.SessionPiece, field: str) -> list[int]:
        validation.check_piece(piece, self._model, field)
        return await self._tokenizer.piece(piece)
