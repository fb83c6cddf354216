"""Stored responses over HTTP: `store`, `previous_response_id`, and GET and DELETE of `/v1/responses/{id}`.

`StoringResponses` stands before vLLM's own class for the Responses API: it puts what comes before a response into its
input, and stores what was answered before the end of the answer is sent, so that whoever has it may go on from it. A
response that fails in its stream is stored without output, as failed.
"""

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.routing import Route

from control_plane.gateway.client_events import STORE_AWAY, items_of
from control_plane.gateway.kept_responses import Item, kept
from control_plane.gateway.refusals import RouterRefused
from control_plane.gateway.stored_record import Record
from control_plane.gateway.stored_responses import StoreAwayError, StoredResponses
from control_plane.gateway.vllm_responses import (
    ends,
    is_refusal,
    missing,
    names_itself,
    refused_name,
    request_of,
    wants_to_be_stored,
)

_PATH = "/v1/responses/{response_id}"
_RETRY_AFTER_MS = 1000


class StoringResponses:
    """By the names that vLLM's routes call. serving: vLLM's own, whose streams end (`failed_streams`)."""

    def __init__(self, serving: Any, store: StoredResponses) -> None:
        self._serving = serving
        self._store = store

    async def create_responses(self, request: Any, raw_request: Request) -> Any:
        # What FastAPI has parsed is no more as it came: vLLM's checks put objects of their own into it.
        fields = json.loads(await raw_request.body())
        is_stored = wants_to_be_stored(request)
        if is_stored and names_itself(request):
            return refused_name()
        previous, before = request.previous_response_id, tuple[Item, ...]()
        if previous is not None:
            found = await _asked(self._store.find(previous))
            if found is None:
                return missing(previous, "previous_response_id")
            before = found.items
        items = (*before, *items_of(fields["input"]))
        if previous is not None:
            request = request_of({**fields, "previous_response_id": None, "request_id": request.request_id}, items)
        made = await self._serving.create_responses(request, raw_request)
        if is_refusal(made):
            return made
        if hasattr(made, "output"):
            made.previous_response_id = previous
            if is_stored:
                await self._keep(items, made)
            return made
        return self._events(made, items, previous, is_stored=is_stored)

    async def retrieve_responses(self, response_id: str, **wishes: Any) -> Any:
        return missing(response_id, "response_id")

    async def cancel_responses(self, response_id: str) -> Any:
        return missing(response_id, "response_id")

    async def _events(
        self, events: Any, items: tuple[Item, ...], previous: str | None, *, is_stored: bool
    ) -> AsyncGenerator[Any, None]:
        async with aclosing(events) as stream:
            async for event in stream:
                if (response := getattr(event, "response", None)) is not None:
                    response.previous_response_id = previous
                    if is_stored and ends(event):
                        await self._keep(items, response)
                yield event

    async def _keep(self, items: tuple[Item, ...], response: Any) -> None:
        said = response.model_dump(mode="json", by_alias=True)
        output = [item.model_dump(mode="json", by_alias=True, exclude_none=True) for item in response.output]
        await self._store.store(Record(response.id, kept(response.id, items, output).items, said))


class StoredRoutes:
    """GET and DELETE, before vLLM's own."""

    def __init__(self, store: StoredResponses) -> None:
        self._store = store

    def attach(self, app: FastAPI) -> None:
        app.router.routes.insert(0, Route(_PATH, self._get, methods=["GET"]))
        app.router.routes.insert(0, Route(_PATH, self._delete, methods=["DELETE"]))

    async def _get(self, request: Request) -> JSONResponse:
        response_id = request.path_params["response_id"]
        if request.query_params.get("stream", "false").lower() == "true":
            return _refused(HTTPStatus.BAD_REQUEST, "The events of a stored response are not kept.", "stream")
        found = await _asked(self._store.find(response_id))
        return _not_found(response_id) if found is None else JSONResponse(found.response)

    async def _delete(self, request: Request) -> JSONResponse:
        response_id = request.path_params["response_id"]
        if not await _asked(self._store.delete(response_id)):
            return _not_found(response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})


async def _asked(call: Any) -> Any:
    """Raises RouterRefused where Redis does not answer."""
    try:
        return await call
    except StoreAwayError:
        raise RouterRefused(STORE_AWAY, HTTPStatus.SERVICE_UNAVAILABLE, _RETRY_AFTER_MS) from None


def _not_found(response_id: str) -> JSONResponse:
    return _refused(HTTPStatus.NOT_FOUND, f"Response with id '{response_id}' not found.", "response_id")


def _refused(status: HTTPStatus, sentence: str, param: str) -> JSONResponse:
    error = {"message": sentence, "type": "invalid_request_error", "param": param, "code": status.value}
    return JSONResponse({"error": error}, status_code=status.value)
