"""What one message of a session's client puts into its prompt: checked, tokenized, admitted, and taken in.

A session takes nothing in that still waits for a slot: its worker may be lost meanwhile, and the next one is opened
with the prompt as it stands.
"""

from collections.abc import Awaitable, Callable

from rachis.v1 import generation_pb2 as generation
from rachis.v1 import router_pb2 as api
from rachis.v1 import worker_pb2 as wire

from cluster_core.errors import InvalidInputError, OutOfOrderError, WithdrawnError
from control_plane.intake import validation
from control_plane.intake.malformed_input import Malformed
from control_plane.intake.prompt_memory import TOKEN_BYTES, HeldPrompt
from control_plane.intake.tokenization import Tokenizer
from control_plane.sessions.session import Change, Command, Input, Session

Message = api.StreamGenerateRequest | Malformed


class SessionIntake:
    """Of one session that is open. opened: its prefix is what chat messages of its `finish` have to fit.

    held: its share of the memory for prompts, where a message counts from the moment it is there. admit: returns once
    what is to change may be computed.
    """

    def __init__(
        self,
        session: Session,
        opened: api.SessionOpen,
        tokenizer: Tokenizer,
        model: wire.ModelInfo,
        held: HeldPrompt,
        admit: Callable[[Change], Awaitable[None]],
    ) -> None:
        self.session = session
        self._prefix = opened.prefix
        self._received_tokens = len(opened.received.token_ids)
        self._tokenizer = tokenizer
        self._model = model
        self._held = held
        self._admit = admit

    async def take(self, message: Message) -> Command | None:
        """What the worker has to be told of it, in the same turn of the loop; None where nothing has changed.

        Raises ClientFault for a message that is refused, which changes nothing, WithdrawnError for `cancel`, and
        OverloadedError where there is no memory or no slot for it.
        """
        if isinstance(message, Malformed):
            raise message.error
        as_tokens = message.ByteSize() // TOKEN_BYTES
        self._hold(as_tokens)
        try:
            change = await self._change(message)
            self._hold(max(as_tokens, change.new_tokens))
            await self._admit(change)
            return self.session.take_in(change)
        finally:
            self._hold()

    def _hold(self, more: int = 0) -> None:
        self._held.resize(len(self.session.tokens) + self._received_tokens + more)

    async def _change(self, message: api.StreamGenerateRequest) -> Change:
        kind = message.WhichOneof("event")
        if kind is None:
            raise InvalidInputError("one of append, update, finish or cancel must be set", field="event")
        if kind == "append":
            return await self._append(message.append)
        if kind == "update":
            return await self._update(message.update)
        if kind == "finish":
            return await self._finish(message.finish)
        if kind == "cancel":
            self.session.cancel()
            raise WithdrawnError("the client cancelled the session")
        raise OutOfOrderError("the session is open already", field="open")

    async def _append(self, append: api.SessionAppend) -> Change:
        self.session.check(Input.APPEND)
        tokens = await self._tokens(append.piece, "append.piece")
        return self.session.appended(tokens)

    async def _update(self, update: api.SessionUpdate) -> Change:
        self.session.check(Input.UPDATE)
        self.session.check_revision(update.revision)
        validation.check_pieces(update.context, self._model, "update.context")
        return self.session.updated(update.revision, await self._tokenizer.pieces(update.context))

    async def _finish(self, finish: api.SessionFinish) -> Change:
        self.session.check(Input.FINISH)
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
        return self.session.finished_with(tokens, tail)

    async def _turns(self, turns: generation.ChatMessages) -> list[int]:
        """What stands after the context with these turns in it."""
        frame = await self._tokenizer.frame(self._prefix, turns)
        if frame.head != self.session.head:
            raise InvalidInputError(
                "the chat template puts something else before the context when these messages follow it",
                field="finish.closing.chat",
            )
        return frame.tail

    async def _tokens(self, piece: api.SessionPiece, field: str) -> list[int]:
        validation.check_piece(piece, self._model, field)
        return await self._tokenizer.piece(piece)
