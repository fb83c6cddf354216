"""What one connection of `/v1/responses` has: the responses to go on from, and the one whose input is still open.

A response that was created with `generate: false` is open until something is generated: `response.append` and
`response.update` change its input, and a warm prompt is told how the prompt begins as far as that is certain. It is
certain as far as two different continuations begin alike, and each is rendered by the code that answers. What is
generated never depends on it.
"""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Protocol

from control_plane.gateway.client_events import (
    Append,
    ClientEvent,
    Create,
    Finish,
    SocketError,
    Update,
    has_open_message,
    not_found,
    store_away,
    too_large,
    with_text,
)
from control_plane.gateway.kept_responses import Item, KeptResponse, KeptResponses, kept
from control_plane.gateway.stored_record import Record
from control_plane.gateway.stored_responses import StoreAwayError
from control_plane.gateway.warm_prompt import CLIENT, Asked, Preview, WarmPrompt

_CONTINUATIONS = ("x", "\n")


@dataclass(frozen=True, slots=True)
class Event:
    """frame: its JSON. response_id: of events with the response as it is then. output: of the one that completes it.
    is_stored: whether the request wants its response to be."""

    frame: str
    response_id: str = ""
    output: tuple[Item, ...] = ()
    is_completion: bool = False
    is_stored: bool = True


class Responses(Protocol):
    """What makes the events of responses: vLLM's code."""

    def events(
        self, fields: Mapping[str, Any], items: Sequence[Item], previous_response_id: str | None, connection: Any
    ) -> AsyncIterator[Event]:
        """Of one response. items: the whole conversation. connection: has the headers that are read.

        Raises SocketError. Closing it early cancels the request.
        """
        ...

    def prepared(self, created: Event) -> Event:
        """The completion of a response that generates nothing. created: the event with which it began."""
        ...


@dataclass(frozen=True, slots=True)
class OpenResponse:
    """before: the items of what it continues. items: its own."""

    response_id: str
    fields: dict[str, Any]
    before: tuple[Item, ...]
    items: tuple[Item, ...]
    previous_response_id: str | None

    @property
    def whole(self) -> tuple[Item, ...]:
        return (*self.before, *self.items)


class Store(Protocol):
    """Of `StoredResponses`."""

    async def store(self, record: Record) -> None: ...

    async def find(self, response_id: str) -> Record | None:
        """Raises StoreAwayError."""
        ...


class Conversation:
    """store: of responses that outlive the connection, where there is one. connection: the WebSocket, whose headers
    vLLM reads. max_bytes: of a whole conversation as JSON, in however many events it comes."""

    def __init__(
        self,
        responses: Responses,
        prompt: WarmPrompt,
        memory: KeptResponses,
        store: Store | None,
        connection: Any,
        max_bytes: int,
    ) -> None:
        self._responses = responses
        self._prompt = prompt
        self._memory = memory
        self._store = store
        self._connection = connection
        self._max_bytes = max_bytes
        self._open: OpenResponse | None = None

    async def frames(self, event: ClientEvent) -> AsyncGenerator[str, None]:
        """What answers an event. Raises SocketError, and the connection stands then as it stood before."""
        if isinstance(event, Append | Update):
            yield await self._change(event)
            return
        if isinstance(event, Finish):
            opened = self._opened()
            items = _appended(opened, event.more).whole
            answer = self._generate(opened.fields, items, opened.response_id)
        else:
            before = await self._before(event.previous_response_id)
            if event.generates:
                answer = self._generate(event.fields, (*before, *event.items), event.previous_response_id)
            else:
                answer = self._prepare(event, before)
        async with aclosing(answer) as frames:
            async for frame in frames:
                yield frame

    async def close(self) -> None:
        await self._prompt.cancel()

    async def _before(self, response_id: str | None) -> tuple[Item, ...]:
        if response_id is None:
            return ()
        found: KeptResponse | Record | None = self._memory.get(response_id)
        if found is None and self._store is not None:
            try:
                found = await self._store.find(response_id)
            except StoreAwayError:
                raise store_away("previous_response_id") from None
        if found is None:
            raise not_found(response_id)
        return found.items

    async def _generate(
        self, fields: Mapping[str, Any], items: tuple[Item, ...], previous: str | None
    ) -> AsyncGenerator[str, None]:
        self._bounded("", items)
        # Of this task, which ends with the response.
        CLIENT.set(self._prompt)
        has_begun = False
        try:
            events = self._responses.events(fields, items, previous, self._connection)
            async with aclosing(events) as stream:  # type: ignore[type-var]
                event: Event
                async for event in stream:
                    has_begun = True
                    if event.is_completion:
                        self._open = None
                        await self._keep_generated(kept(event.response_id, items, event.output), event)
                    yield event.frame
        finally:
            if has_begun:
                await self._prompt.cancel()

    async def _prepare(self, event: Create, before: tuple[Item, ...]) -> AsyncGenerator[str, None]:
        opened = OpenResponse("", event.fields, before, event.items, event.previous_response_id)
        whole = self._bounded("", opened.whole)
        first, *others = await self._tell(opened)
        self._open = replace(opened, response_id=first.response_id)
        self._memory.add(replace(whole, response_id=first.response_id))
        for each in (first, *others, self._responses.prepared(first)):
            yield each.frame

    async def _change(self, event: Append | Update) -> str:
        opened = self._opened()
        changed = _appended(opened, event) if isinstance(event, Append) else replace(opened, items=event.items)
        whole = self._bounded(changed.response_id, changed.whole)
        await self._tell(changed)
        self._open = changed
        self._memory.add(whole)
        said = {
            "type": "response.appended" if isinstance(event, Append) else "response.updated",
            "response_id": changed.response_id,
            "told_tokens": len(self._prompt.told),
        }
        return json.dumps(said)

    async def _tell(self, opened: OpenResponse) -> list[Event]:
        """Returns the events with which a response of this input begins."""
        first, events = await self._preview(opened, _CONTINUATIONS[0])
        second, _ = await self._preview(opened, _CONTINUATIONS[1])
        await self._prompt.tell(first, second, is_limited=opened.fields.get("max_output_tokens") is not None)
        return events

    async def _preview(self, opened: OpenResponse, continuation: str) -> tuple[Asked, list[Event]]:
        preview, events = Preview(), list[Event]()
        CLIENT.set(preview)
        items = _continued(opened.whole, continuation)
        stream = self._responses.events(opened.fields, items, opened.previous_response_id, self._connection)
        try:
            async for event in stream:
                events.append(event)
        except SocketError:
            # What ends a preview, once it is one.
            if preview.asked is None:
                raise
        assert preview.asked is not None, "a response is asked of a router"
        return preview.asked, events

    def _bounded(self, response_id: str, items: tuple[Item, ...]) -> KeptResponse:
        """Raises SocketError: vLLM cuts off what is too long for the model where a request says so."""
        whole = kept(response_id, items)
        if whole.size_bytes > self._max_bytes:
            raise too_large(whole.size_bytes, self._max_bytes)
        return whole

    def _opened(self) -> OpenResponse:
        if self._open is None:
            raise SocketError(
                "No response is open: begin one with response.create and generate: false.",
                code="no_open_response", param="type",
            )  # fmt: skip
        return self._open

    async def _keep_generated(self, response: KeptResponse, event: Event) -> None:
        self._memory.add(response)
        if self._store is not None and event.is_stored:
            said = json.loads(event.frame)["response"]
            await self._store.store(Record(response.response_id, response.items, said))


def _appended(opened: OpenResponse, more: Append) -> OpenResponse:
    """Raises SocketError."""
    return replace(opened, items=(*with_text(opened.items, more.text), *more.items))


def _continued(items: tuple[Item, ...], text: str) -> tuple[Item, ...]:
    if has_open_message(items):
        return with_text(items, text)
    return (*items, {"type": "message", "role": "user", "content": text})
