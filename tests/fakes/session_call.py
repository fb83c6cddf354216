"""A client's session with a router, message by message, as tests drive it."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from rachis.conventions import next_message
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import router_pb2 as api

from tests.fakes.answers import failure

_OPEN_FIELDS = ("model", "request_id", "cache_salt", "priority", "received")


def session_open(prefix: str | None, mode: str, **values: Any) -> api.SessionOpen:
    """Values that are no field of `open` are fields of its sampling."""
    fields = {name: values.pop(name) for name in _OPEN_FIELDS if name in values}
    sampling = generation.SamplingParams(**{"temperature": 0.0, "max_tokens": 8, **values})
    number = generation.SessionMode.Value(f"SESSION_MODE_{mode}")
    text = None if prefix is None else generation.PromptInput(text=prefix)
    return api.SessionOpen(mode=number, prefix=text, sampling=sampling, **fields)


class SessionCall:
    """A client's session, message by message. Every event but progress is read in turn; `progress` is the latest."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.progress = generation.SessionProgress()
        self.progress_events = 0

    async def open(self, prefix: str | None = "hello", mode: str = "APPEND", **values: Any) -> api.SessionAccepted:
        """Sends `open` and waits until the session is accepted. `values` are fields of `open` or of its sampling."""
        await self.send(open=session_open(prefix, mode, **values))
        return (await self.event("accepted")).accepted

    async def send(self, **event: Any) -> None:
        await self.call.write(api.StreamGenerateRequest(**event))

    async def append(self, text: str) -> None:
        await self.send(append=api.SessionAppend(piece=api.SessionPiece(text=text)))

    async def update(self, revision: int, *texts: str) -> None:
        context = [api.SessionPiece(text=text) for text in texts]
        await self.send(update=api.SessionUpdate(revision=revision, context=context))

    async def finish(self, closing: str | None = None) -> None:
        text = None if closing is None else generation.PromptInput(text=closing)
        await self.send(finish=api.SessionFinish(closing=text))

    async def next_event(self) -> api.StreamGenerateResponse | None:
        """The next event that is no progress; None at the end."""
        while (response := await next_message(self.call)) is not None:
            if not response.HasField("progress"):
                break
            self._note(response.progress)
        event: api.StreamGenerateResponse | None = response
        return event

    async def event(self, kind: str) -> api.StreamGenerateResponse:
        event = await self.next_event()
        assert event is not None, "the session has ended"
        assert event.WhichOneof("event") == kind, event
        return event

    async def refused(self) -> tuple[str, str, int]:
        """Status, field and number of the message that was refused."""
        refused = (await self.event("refused")).refused
        assert refused.message.startswith(refused.field)
        return refused.status, refused.field, refused.message_number

    async def progressed(self, holds: Callable[[generation.SessionProgress], bool]) -> generation.SessionProgress:
        """Reads progress until it is as described; nothing else may come meanwhile."""
        while not holds(self.progress):
            response = await next_message(self.call)
            assert response is not None and response.HasField("progress"), response
            self._note(response.progress)
        return self.progress

    async def answer(self) -> list[api.StreamGenerateResponse]:
        """Everything up to the end of the stream, progress aside."""
        events = []
        while (event := await self.next_event()) is not None:
            events.append(event)
        return events

    async def failure(self) -> grpc.aio.AioRpcError:
        return await failure(self._events())

    def _note(self, progress: generation.SessionProgress) -> None:
        self.progress = progress
        self.progress_events += 1

    async def _events(self) -> AsyncIterator[api.StreamGenerateResponse]:
        while (event := await self.next_event()) is not None:
            yield event
