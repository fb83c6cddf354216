"""A streaming session from its client's side.

    async with client.session("Answer from these pages. ", mode="append", max_tokens=64) as session:
        await session.append_all(retriever)
        async for delta in session.finish("\\nWho was it?"):
            print(delta.text, end="")
    print(session.completion.session.ttft_from_finish_ms)

Leaving the block early cancels the session. A message that the router refuses raises RefusedError: in the next call,
or, once the answer is awaited, there; the session goes on without it. What ends the session is raised as one of
`rachis.errors`, as by every call; whatever is sent once it has ended well or was left raises OutOfOrderError.

A router that is gone ends no session: another one is told all that was sent, and how much of the answer has come
(`lost_routers`). A call that is cancelled while a router takes its message ends the session: whether the router has it
nobody knows.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from time import monotonic
from types import TracebackType
from typing import Any, Self

import grpc

from rachis import grpc_private
from rachis.answer_queue import AnswerQueue
from rachis.conventions import next_message
from rachis.errors import FailedError, InvalidInputError, OutOfOrderError, typed
from rachis.lost_routers import LostRouters, Received
from rachis.outbox import KeptBytes, Outbox, Sent
from rachis.prompts import each_of, is_token_ids, piece_of, prompt_of
from rachis.routers import MAX_MESSAGE_BYTES
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import router_pb2 as api

# How far the answer may be ahead of who reads it, and how many refusals are kept.
_EVENTS_AHEAD = 64
_REFUSALS_KEPT = 1000
_ENDED = "the session has ended"
# From a session's deadline until its end is heard.
_GRACE_S = 5.0

# Whether a call that ended so is made again.
GoesOn = Callable[[grpc.aio.AioRpcError, LostRouters, int, float], Awaitable[bool]]


class RefusedError(Exception):
    """One message was refused. status: name of a gRPC status. field: of the message. message_number: `open` is 1."""

    def __init__(self, refused: api.SessionRefused) -> None:
        super().__init__(refused.message)
        self.status = refused.status
        self.field = refused.field
        self.message_number = refused.message_number


class AsyncSession:
    """Made by `AsyncClient.session`; called by one task at a time.

    progress: what was told last; it begins anew with another router. first_token, completion: once they have come.
    refusals: the latest, raised or not. routers_lost: how many were gone under it. received: what has been taken of the
    answer, for another session of the same input to go on with.
    """

    def __init__(
        self,
        method: Any,
        opening: api.SessionOpen,
        timeout_s: float,
        budget: KeptBytes,
        goes_on: GoesOn,
        received: Received,
    ) -> None:
        self._method = method
        self._opening = api.StreamGenerateRequest(open=opening)
        self._timeout_s = timeout_s
        self._goes_on = goes_on
        # What has come, and what of it has been taken.
        self._received, self.received = received.copy(), received
        self._lost = LostRouters(len(received))
        self._revision = 0
        self._accepted = asyncio.Event()
        self._outbox = Outbox(budget)
        # The message whose answer is awaited.
        self._finish: Sent | None = None
        self._unraised: deque[RefusedError] = deque(maxlen=_REFUSALS_KEPT)
        self._answer: AnswerQueue[generation.CompletionDelta | RefusedError] = AnswerQueue(_EVENTS_AHEAD)
        self._failure: Exception | None = None
        # A message was given up while a router took it: nobody may be told of it again.
        self._is_broken = False
        self._is_complete = False
        self._deadline_s = 0.0
        self._call: Any
        self._reader: asyncio.Task[None]
        self._writer: asyncio.Task[None]
        self.request_id = ""
        self.prefill_worker_id = ""
        self.progress = generation.SessionProgress()
        self.first_token: api.SessionFirstToken | None = None
        self.completion = generation.Completion()
        self.refusals: deque[RefusedError] = deque(maxlen=_REFUSALS_KEPT)

    @property
    def routers_lost(self) -> int:
        return self._lost.lost

    async def __aenter__(self) -> Self:
        """Returns once the session is accepted."""
        self._deadline_s = monotonic() + self._timeout_s
        self._say_received()
        self._begin_call()
        self._reader = asyncio.create_task(self._read())
        try:
            await self._send(self._opening)
            await self._accepted.wait()
            self._raise_failure()
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._end()

    async def append(self, piece: Any) -> None:
        """Adds to the end of the context: a str, token ids, a `Document`, or a retriever's document.

        Waits while the router reads nothing. Raises RefusedError for a message before, and sends nothing then; what has
        ended the session, OutOfOrderError where it ended well.
        """
        await self._send(api.StreamGenerateRequest(append=api.SessionAppend(piece=piece_of(piece))))

    async def append_all(self, pieces: AsyncIterable[Any] | Iterable[Any]) -> int:
        """Appends what an iterator gives as it gives it, and returns how many that were."""
        count = 0
        async with aclosing(each_of(pieces)) as found:  # type: ignore[type-var]
            async for piece in found:
                await self.append(piece)
                count += 1
        return count

    async def update(self, context: Any) -> None:
        """Replaces the whole context, by a piece or a list of pieces; counts the revisions. Raises as `append`."""
        one = isinstance(context, str) or not isinstance(context, Sequence) or is_token_ids(context)
        pieces = [piece_of(piece) for piece in ([context] if one else context)]
        self._revision += 1
        update = api.SessionUpdate(revision=self._revision, context=pieces)
        await self._send(api.StreamGenerateRequest(update=update))

    async def finish(self, closing: Any = None) -> AsyncGenerator[generation.CompletionDelta, None]:
        """Completes the prompt and yields the answer. closing: a str, token ids, chat messages or a `PromptInput`.

        Raises RefusedError: for this message, and the session can be finished again; for one before it that was on its
        way, and the answer goes on without it, in `deltas`.
        """
        finish = api.SessionFinish(closing=prompt_of(closing, "closing"))
        await self._send(api.StreamGenerateRequest(finish=finish))
        async with aclosing(self.deltas()) as deltas:
            delta: generation.CompletionDelta
            async for delta in deltas:
                yield delta

    @property
    def ended(self) -> bool:
        """Whether nothing more comes from the router."""
        return self._reader.done()

    @property
    def answering(self) -> bool:
        """Whether `finish` was sent and not refused: the answer, or what is left of it, comes in `deltas`."""
        return self._finish is not None

    async def deltas(self) -> AsyncGenerator[generation.CompletionDelta, None]:
        """What is still to come of the answer. Raises as `finish`."""
        while (item := await self._answer.take()) is not None:
            if isinstance(item, Exception):
                raise item
            self.received.add(item)
            yield item
        self._raise_failure()

    async def _send(self, request: api.StreamGenerateRequest) -> None:
        self._raise_refusal()
        if request.ByteSize() > MAX_MESSAGE_BYTES:
            raise InvalidInputError.local(
                f"has {request.ByteSize()} bytes, a client sends {MAX_MESSAGE_BYTES} at most", field="message"
            )
        sent = self._outbox.add(request)
        before, self._finish = self._finish, sent if request.HasField("finish") else self._finish
        try:
            async with asyncio.timeout(self._left_s() + _GRACE_S):
                is_taken = await asyncio.shield(sent.taken)
        except TimeoutError:
            # The call is over, and its end lies behind an answer that nobody reads.
            raise OutOfOrderError.local(_ENDED) from None
        except asyncio.CancelledError:
            if self._outbox.withdraw(sent):
                self._finish = before
            else:
                # Whether the router takes it nobody knows: whoever sent it again would send it twice.
                self._is_broken = True
                self._call.cancel()
            raise
        if not is_taken:
            self._raise_failure()
            raise OutOfOrderError.local(_ENDED)

    def _left_s(self) -> float:
        return max(0.0, self._deadline_s - monotonic())

    def _begin_call(self) -> None:
        self._call = self._method(timeout=self._left_s())
        self._writer = asyncio.create_task(self._write(self._call))

    async def _write(self, call: Any) -> None:
        """Until the call takes nothing more: whoever reads hears why."""
        try:
            while await grpc_private.write(call, await self._outbox.next()):
                self._outbox.written()
        except Exception as error:  # noqa: BLE001 - whoever waits for an answer hears of it
            self._failure = error
            call.cancel()

    async def _read(self) -> None:
        try:
            while await self._read_call():
                pass
            if not self._is_complete:
                raise FailedError.local("the service ended the session without a completion")
        except grpc.aio.AioRpcError as error:
            self._failure = self._failure or typed(error)
        except Exception as error:  # noqa: BLE001 - whoever waits for an answer hears of it
            self._failure = self._failure or error
        except asyncio.CancelledError:
            # By `_end`, or by gRPC where the client was closed or the call cancelled.
            self._failure = self._failure or OutOfOrderError.local(_ENDED)
            raise
        finally:
            self._outbox.close()
            self._accepted.set()
            self._answer.end()

    async def _read_call(self) -> bool:
        """To the end of one call. Returns whether another one is made. Raises AioRpcError."""
        try:
            while (response := await next_message(self._call)) is not None:
                await self._take(response)
        except grpc.aio.AioRpcError as error:
            if self._is_complete:
                return False
            await _ended(self._writer)
            if self._is_broken or not self._outbox.keeps_all:
                raise
            goes_on = await self._goes_on(error, self._lost, len(self._received), self._deadline_s)
            # A message may have been given up meanwhile.
            if self._is_broken or not goes_on:
                raise
            self._say_received()
            self._outbox.start_again()
            self._begin_call()
            return True
        return False

    async def _take(self, response: api.StreamGenerateResponse) -> None:
        kind = response.WhichOneof("event")
        if kind == "progress":
            self.progress = response.progress
        elif kind == "first_token":
            self.first_token = response.first_token
            await self._take_delta(response.first_token.delta)
        elif kind == "delta":
            await self._take_delta(response.delta)
        elif kind == "completion":
            self.completion = response.completion
            self._is_complete = True
        elif kind == "refused":
            await self._take_refusal(RefusedError(response.refused))
        elif kind == "accepted":
            self.request_id = response.request_id
            self.prefill_worker_id = self.prefill_worker_id or response.accepted.prefill_worker_id
            self._accepted.set()

    def _say_received(self) -> None:
        if self._received:
            self._opening.open.received.CopyFrom(self._received.to_wire())

    async def _take_delta(self, delta: generation.CompletionDelta) -> None:
        await self._answer.put(delta)
        self._received.add(delta)

    async def _take_refusal(self, refused: RefusedError) -> None:
        refused.message_number = self._outbox.number_of(refused.message_number)
        self._outbox.refused(refused.message_number)
        self.refusals.append(refused)
        if self._finish is None:
            self._unraised.append(refused)
            return
        if refused.message_number == self._finish.number:
            self._finish = None
        await self._answer.put(refused)

    def _raise_refusal(self) -> None:
        if self._unraised:
            raise self._unraised.popleft()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def _end(self) -> None:
        self._call.cancel()
        await _ended(self._reader, self._writer)


async def _ended(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def stream_documents(
    session: AsyncSession, documents: AsyncIterable[Any] | Iterable[Any], closing: Any = None
) -> AsyncGenerator[generation.CompletionDelta, None]:
    """Opens the session, appends documents as they are found, finishes it, and yields the answer.

    Closing the iterator early cancels the session. Raises as `AsyncSession.finish`.
    """
    async with session:
        await session.append_all(documents)
        async with aclosing(session.finish(closing)) as deltas:
            delta: generation.CompletionDelta
            async for delta in deltas:
                yield delta
