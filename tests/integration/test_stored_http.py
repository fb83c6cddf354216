"""Stored responses over HTTP without a service: what is put before an input, what is stored, and Redis that is away."""

import json
from collections.abc import AsyncIterator
from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI, Request
from vllm.entrypoints.openai.responses.protocol import ResponseCompletedEvent, ResponsesRequest, ResponsesResponse

from control_plane.gateway import front
from control_plane.gateway.refusals import RouterRefused
from control_plane.gateway.stored_http import StoredRoutes, StoringResponses
from control_plane.gateway.stored_record import Record
from control_plane.gateway.stored_responses import StoreAwayError
from control_plane.gateway.vllm_responses import VllmResponses

pytestmark = pytest.mark.integration

ANSWER: dict[str, Any] = {
    "type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
    "content": [{"type": "output_text", "text": "blue", "annotations": []}],
}  # fmt: skip


class Store:
    """In place of Redis."""

    def __init__(self, *, is_away: bool = False) -> None:
        self.records: dict[str, Record] = {}
        self.is_away = is_away

    async def store(self, record: Record) -> None:
        if not self.is_away:
            self.records[record.response_id] = record

    async def find(self, response_id: str) -> Record | None:
        if self.is_away:
            raise StoreAwayError
        return self.records.get(response_id)

    async def delete(self, response_id: str) -> bool:
        if self.is_away:
            raise StoreAwayError
        return self.records.pop(response_id, None) is not None


class Serving:
    """In place of vLLM's class. asked: its requests."""

    def __init__(self) -> None:
        self.asked: list[ResponsesRequest] = []

    async def create_responses(self, request: ResponsesRequest, raw_request: Any) -> Any:
        self.asked.append(request)
        # As vLLM does before it begins: what stores is not its own.
        request.store = False
        response = ResponsesResponse(
            id=request.request_id, model="m", output=cast(Any, [ANSWER]), parallel_tool_calls=True, temperature=0,
            tool_choice="none", tools=[], top_p=1, background=False, max_output_tokens=1, service_tier="auto",
            status="completed", truncation="disabled",
        )  # fmt: skip
        return self._events(response) if request.stream else response

    async def _events(self, response: ResponsesResponse) -> AsyncIterator[Any]:
        yield ResponseCompletedEvent(type="response.completed", sequence_number=0, response=response)


class Raw:
    """A request whose body is this."""

    def __init__(self, body: dict[str, Any]) -> None:
        self._body = body

    async def body(self) -> bytes:
        return json.dumps(self._body).encode()


async def asked(storing: StoringResponses, **fields: Any) -> Any:
    """The response, of its last event where it is streamed."""
    made = await storing.create_responses(ResponsesRequest(**fields), cast(Request, Raw(fields)))
    if fields.get("stream"):
        return [event async for event in made][-1].response
    return made


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_what_came_before_is_put_into_the_input(is_streamed: bool) -> None:
    serving, store = Serving(), Store()
    storing = StoringResponses(serving, cast(Any, store))
    first = await asked(storing, input="k1=", stream=is_streamed)
    assert store.records[first.id].response["output"][0]["content"][0]["text"] == "blue"
    second = await asked(storing, input=[{"role": "user", "content": "k2="}], previous_response_id=first.id)
    assert second.previous_response_id == first.id
    whole = serving.asked[-1]
    assert whole.previous_response_id is None, "vLLM looks for it in a store of its own"
    assert whole.request_id == second.id
    texts = [item["content"] if isinstance(item, dict) else item.content[0].text for item in whole.input]
    assert texts == ["k1=", "blue", "k2="]


@pytest.mark.parametrize("no", [False, "false", 0, "off"])
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_response_that_is_not_to_be_stored_is_not(no: Any, is_streamed: bool) -> None:
    store = Store()
    storing = StoringResponses(Serving(), cast(Any, store))
    await asked(storing, input="k1=", store=no, stream=is_streamed)
    assert store.records == {}
    kept = await asked(storing, input="k1=", store=None)
    await asked(storing, input="k1=", store=no, previous_response_id=kept.id)
    assert list(store.records) == [kept.id]


@pytest.mark.parametrize(
    ("store", "is_stored"), [(False, False), ("false", False), (0, False), (None, True), ("true", True)]
)
async def test_over_a_websocket_it_is_not_either(store: Any, is_stored: bool) -> None:
    fields = {"model": "m", "store": store}
    items: Any = [{"type": "message", "role": "user", "content": "k1="}]
    responses = VllmResponses(cast(Any, Serving()))
    (completed,) = [event async for event in responses.events(fields, items, None, None)]
    assert (completed.is_completion, completed.is_stored) == (True, is_stored)


async def test_a_response_that_is_stored_has_no_name_of_its_clients() -> None:
    """Another one of that name would not be stored, and nobody would be told."""
    store = Store()
    storing = StoringResponses(Serving(), cast(Any, store))
    refused = await asked(storing, input="k1=", request_id="resp_mine")
    assert (refused.error.code, refused.error.param) == (400, "request_id")
    assert "the id is the service's to give" in refused.error.message
    assert (await asked(storing, input="k1=", request_id="resp_mine", store=False)).id == "resp_mine"
    assert store.records == {}


async def test_one_that_is_not_there_is_not_found() -> None:
    refused = await asked(StoringResponses(Serving(), cast(Any, Store())), input="x", previous_response_id="resp_0")
    assert (refused.error.code, refused.error.param) == (404, "previous_response_id")


async def test_while_redis_is_away_answers_come_and_what_is_stored_is_refused_for_a_while() -> None:
    storing = StoringResponses(Serving(), cast(Any, Store(is_away=True)))
    assert (await asked(storing, input="k1=")).status == "completed"
    with pytest.raises(RouterRefused):
        await asked(storing, input="k1=", previous_response_id="resp_1")


@pytest.mark.parametrize("is_away", [False, True])
async def test_the_routes(is_away: bool) -> None:
    app, store = FastAPI(), Store(is_away=is_away)
    app.exception_handler(RouterRefused)(front.refused)
    StoredRoutes(cast(Any, store)).attach(app)
    store.records["resp_1"] = Record("resp_1", (), {"id": "resp_1"})
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as http:
        answers = [await http.get("/v1/responses/resp_1"), await http.get("/v1/responses/resp_2")]
        answers += [await http.delete("/v1/responses/resp_1"), await http.delete("/v1/responses/resp_1")]
        streamed = await http.get("/v1/responses/resp_1?stream=true")
    assert (streamed.status_code, streamed.json()["error"]["param"]) == (400, "stream")
    if is_away:
        assert [(each.status_code, each.headers["retry-after"]) for each in answers] == [(503, "1")] * 4
        return
    assert [each.status_code for each in answers] == [200, 404, 200, 404]
    assert answers[0].json() == {"id": "resp_1"}
    assert answers[2].json() == {"id": "resp_1", "object": "response", "deleted": True}
