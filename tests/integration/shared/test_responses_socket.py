"""OpenAI's WebSocket mode against a running service: the same answers as over HTTP, in pieces or at once."""

import asyncio
import functools
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import psutil
import pytest
import pytest_asyncio
import websockets
from rachis import AsyncClient

from command_line.own_service import Target
from tests.integration import secured
from tests.integration.conftest import until
from tests.integration.session_play import idle

pytestmark = pytest.mark.integration

MODEL = "rachis-builtin"
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 12, "ignore_eos": True}
# Every token of the answer is in it: a stream leaves those out that have no text.
TOKENS: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 1, "skip_special_tokens": False}
PROMPT = "k1=blue; k2=red; k17=melon; the sky; k9=pear; "
ENDS = frozenset({"response.completed", "error", "response.appended", "response.updated"})
MOST_MIB = 16


class Connection:
    """One socket; what is asked is answered before the next is."""

    def __init__(self, socket: websockets.ClientConnection) -> None:
        self.socket = socket

    async def ask(self, kind: str, **fields: Any) -> list[dict[str, Any]]:
        await self.socket.send(json.dumps({"type": kind, **fields}))
        return await self.heard()

    async def heard(self) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        while not events or events[-1]["type"] not in ENDS:
            events.append(json.loads(await asyncio.wait_for(self.socket.recv(), 120)))
        return events

    async def create(self, **fields: Any) -> dict[str, Any]:
        """The response, whole."""
        return response_of(await self.ask("response.create", **{**GREEDY, **fields}))

    async def refused(self, frame: str | bytes) -> tuple[int, str, str | None]:
        """(status, code, field)"""
        await self.socket.send(frame)
        event = (await self.heard())[-1]
        assert event["type"] == "error", event
        return event["status"], event["error"]["code"], event["error"]["param"]


def response_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    assert events[-1]["type"] == "response.completed", events[-1]
    return dict(events[-1]["response"])


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] for part in item.get("content", ()))


def tokens_of(response: dict[str, Any]) -> list[str]:
    parts = [part for item in response["output"] for part in item.get("content", ())]
    return [each["token"] for part in parts for each in part["logprobs"] or ()]


@asynccontextmanager
async def connected(gateway: str) -> AsyncIterator[Connection]:
    url = f"{gateway.replace('http', 'ws')}/v1/responses"
    async with websockets.connect(url, max_size=None, open_timeout=60, additional_headers=secured.headers()) as socket:
        yield Connection(socket)


@pytest_asyncio.fixture
async def connection(gateway: str) -> AsyncIterator[Connection]:
    async with connected(gateway) as made:
        yield made


async def posted(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answered = await http.post("/v1/responses", json={**GREEDY, **fields})
    assert answered.status_code == 200, answered.text
    return dict(answered.json())


async def streamed(http: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    """The events."""
    answered = await http.post("/v1/responses", json={**GREEDY, **fields, "stream": True})
    lines = answered.text.splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


async def sessions(http: httpx.AsyncClient) -> dict[str, int]:
    """By what became of them."""
    lines = (await http.get("/metrics")).text.splitlines()
    found = [line for line in lines if line.startswith("rachis_gateway_sessions_total{")]
    return {line.split('"')[1]: int(float(line.rsplit(" ", 1)[1])) for line in found}


# OpenAI's mode.


def _without_names(event: dict[str, Any]) -> str:
    """Of what differs between two answers to the same question."""
    if "response" in event:
        event = {**event, "response": {**event["response"], "id": "", "created_at": 0, "usage": None}}
        event["response"]["output"] = [{**item, "id": ""} for item in event["response"]["output"]]
    if "item" in event:
        event = {**event, "item": {**event["item"], "id": ""}}
    return json.dumps({**event, "item_id": ""}, sort_keys=True)


async def test_frames_are_the_events_of_a_stream(connection: Connection, http: httpx.AsyncClient) -> None:
    asked = {**GREEDY, "input": f"{PROMPT}k17=", "store": False}
    # The same tokens cached before both.
    await posted(http, **asked)
    frames = await connection.ask("response.create", **asked)
    events = await streamed(http, **asked)

    def joined(of: list[dict[str, Any]]) -> list[str]:
        """Deltas of text together: how many come at once is a matter of time."""
        deltas = "".join(event["delta"] for event in of if event["type"] == "response.output_text.delta")
        others = [{**event, "sequence_number": 0} for event in of if event["type"] != "response.output_text.delta"]
        return [deltas, *map(_without_names, others)]

    assert joined(frames) == joined(events)
    assert [event["sequence_number"] for event in frames] == list(range(len(frames)))


async def test_openais_client_goes_on_from_what_is_not_stored(gateway: str, http: httpx.AsyncClient) -> None:
    wishes: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 8, "store": False}
    said: list[tuple[str, str | None]] = []
    turns: list[dict[str, Any]] = []
    async with openai.AsyncOpenAI(base_url=f"{gateway}/v1", api_key=secured.key()) as client:  # noqa: SIM117 - one of the other
        async with client.responses.connect() as socket:
            for question in (f"{PROMPT}k1=", "k17=", "k9="):
                previous = said[-1][1] if said else None
                await socket.response.create(input=question, previous_response_id=previous, **wishes)
                async for event in socket:
                    if event.type == "response.completed":
                        assert event.response.previous_response_id == previous
                        said.append((event.response.output_text, event.response.id))
                        break
                turns.append({"role": "user", "content": question})
                at_once = await posted(http, **wishes, input=turns, ignore_eos=False)
                assert said[-1][0] == text_of(at_once)
                turns.append({"role": "assistant", "content": said[-1][0]})
    assert [text.split(";")[0] for text, _ in said] == ["blue", "melon", "pear"]


async def test_who_leaves_cancels_the_request(gateway: str, client: AsyncClient) -> None:
    async with connected(gateway) as connection:
        asked = {**GREEDY, "input": PROMPT, "max_output_tokens": 3000}
        await connection.socket.send(json.dumps({"type": "response.create", **asked}))
        for _ in range(6):
            await asyncio.wait_for(connection.socket.recv(), 120)
        assert any(view.in_flight_requests for view in await client.workers())
    await until(functools.partial(idle, client), "nothing is left")


async def test_one_response_at_a_time(connection: Connection) -> None:
    await connection.socket.send(json.dumps({"type": "response.create", **GREEDY, "input": PROMPT}))
    await connection.socket.send(json.dumps({"type": "response.create", **GREEDY, "input": PROMPT}))
    first = await connection.heard()
    second = [] if first[-1]["type"] != "error" else await connection.heard()
    errors = [event["error"]["code"] for event in first + second if event["type"] == "error"]
    assert errors in ([], ["response_already_in_flight"])
    if not errors:
        # The first had ended before the second was read.
        response_of(await connection.heard())
    assert text_of(await connection.create(input=PROMPT))


@pytest.mark.parametrize(
    ("frame", "refusal"),
    [
        ("nonsense", (400, "invalid_json", "frame")),
        (b"\x00\x01", (400, "invalid_frame", "frame")),
        ("{" + " " * (MOST_MIB << 20) + "}", (400, "frame_too_large", "frame")),
        ('{"type": "response.steer"}', (400, "unknown_event_type", "type")),
        ('{"type": "response.create", "input": "x", "n": 2}', (400, "unsupported_parameter", "n")),
        ('{"type": "response.create", "input": "x", "what": 2}', (400, "unknown_parameter", "what")),
        ('{"type": "response.create", "input": "x", "model": "none"}', (404, "not_found", "model")),
        ('{"type": "response.create", "input": "x", "temperature": "hot"}', (400, "invalid_value", "temperature")),
        ('{"type": "response.create", "input": "x", "temperature": -1}', (400, "invalid_value", "temperature")),
        ('{"type": "response.create", "input": [{"role": "x"}]}', (400, "invalid_value", "input")),
        (
            '{"type": "response.create", "input": "x", "kv_transfer_params": {"a": 1}}',
            (400, "invalid_value", "extra_args"),
        ),
        (
            '{"type": "response.create", "input": "x", "previous_response_id": "resp_0"}',
            (400, "previous_response_not_found", "previous_response_id"),
        ),
        ('{"type": "response.append", "text": "x"}', (400, "no_open_response", "type")),
        ('{"type": "response.finish"}', (400, "no_open_response", "type")),
        (
            json.dumps({"type": "response.create", "generate": False, "input": "k1=blue; " * 3000}),
            (400, "invalid_value", "input_tokens"),
        ),
    ],
)
async def test_a_mistake_is_answered_and_the_connection_goes_on(
    connection: Connection, frame: str | bytes, refusal: tuple[int, str, str]
) -> None:
    assert await connection.refused(frame) == refusal
    assert text_of(await connection.create(input=f"{PROMPT}k1=", max_output_tokens=1)) == "blue"


async def test_a_frame_beyond_all_limits_ends_its_connection(connection: Connection) -> None:
    with pytest.raises(websockets.ConnectionClosedError) as ended:
        await connection.socket.send("x" * ((MOST_MIB + 2) << 20))
        await asyncio.wait_for(connection.socket.recv(), 60)
    assert ended.value.rcvd is not None
    assert ended.value.rcvd.code == 1009


# In pieces.


def cut(rng: random.Random, text: str, pieces: int) -> list[str]:
    """At any place, also within what is one token."""
    places = sorted(rng.randrange(len(text) + 1) for _ in range(pieces - 1))
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.parametrize("seed", range(12))
async def test_an_input_in_pieces_has_the_answer_of_the_whole(
    connection: Connection, http: httpx.AsyncClient, seed: int
) -> None:
    rng = random.Random(seed)
    wishes = {
        **GREEDY,
        **TOKENS,
        "max_output_tokens": rng.randint(1, 24),
        "instructions": rng.choice([None, "Recall."]),
    }
    before, previous = list[dict[str, Any]](), None
    for _ in range(rng.randint(1, 2)):
        facts = "".join(
            f"k{rng.randrange(64)}={rng.choice(['blue', 'melon', 'fox'])}; " for _ in range(rng.randint(3, 40))
        )
        text = f"{facts}k{rng.randrange(64)}="
        first, *pieces, last = cut(rng, text, rng.randint(2, 6))
        opened = await connection.create(**wishes, generate=False, input=first, previous_response_id=previous)
        assert (opened["output"], opened["usage"]) == ([], None)
        for piece in filter(None, pieces):
            (said,) = await connection.ask("response.append", text=piece)
            assert said["response_id"] == opened["id"]
        answered = response_of(await connection.ask("response.finish", text=last))
        before.append({"role": "user", "content": text})
        at_once = await posted(http, **wishes, input=before, store=False)
        assert (text_of(answered), tokens_of(answered)) == (text_of(at_once), tokens_of(at_once))
        assert answered["usage"]["input_tokens"] == at_once["usage"]["input_tokens"]
        assert answered["usage"]["output_tokens"] == len(tokens_of(answered)) == wishes["max_output_tokens"]
        before.append({"role": "assistant", "content": text_of(answered)})
        previous = answered["id"]


async def test_a_session_answers_and_leaves_nothing(gateway: str, http: httpx.AsyncClient, client: AsyncClient) -> None:
    before = await sessions(http)
    async with connected(gateway) as connection:
        opened = await connection.create(generate=False, input=PROMPT * 6, **TOKENS)
        (said,) = await connection.ask("response.append", text=PROMPT)
        assert said["told_tokens"] > 100
        answered = await connection.create(previous_response_id=opened["id"], input="k17=", **TOKENS)
        whole = [{"role": "user", "content": PROMPT * 7}, {"role": "user", "content": "k17="}]
        assert tokens_of(answered) == tokens_of(await posted(http, input=whole, **TOKENS))
        await connection.create(generate=False, input=PROMPT * 6)
    await until(functools.partial(idle, client), "the session that nobody finished is gone")
    after = await sessions(http)
    assert {name: after[name] - before[name] for name in after} == {
        "opened": 2, "answered": 1, "cancelled": 1, "lost": 0,
    }  # fmt: skip


async def test_without_a_limit_the_prefix_is_in_the_cache_when_it_is_asked_for(
    connection: Connection, http: httpx.AsyncClient, client: AsyncClient
) -> None:
    text = "k40=fox; k41=owl; k42=seal; " * 20
    opened = await connection.create(generate=False, input=text, max_output_tokens=None)

    async def computed() -> bool:
        answered = await posted(http, input=text, max_output_tokens=1)
        return bool(answered["usage"]["input_tokens_details"]["cached_tokens"])

    await until(computed, "the prefix is computed")
    answered = response_of(await connection.ask("response.finish", text="k41="))
    assert answered["previous_response_id"] == opened["id"]
    assert answered["usage"]["input_tokens_details"]["cached_tokens"] > 0
    assert text_of(answered).startswith("owl")


async def test_an_update_replaces_the_input(connection: Connection, http: httpx.AsyncClient) -> None:
    await connection.create(generate=False, input="k1=blue; k2=red; ")
    (said,) = await connection.ask("response.update", input="k1=pink; k2=red; ")
    assert said["type"] == "response.updated"
    answered = response_of(await connection.ask("response.finish", text="k1="))
    assert text_of(answered) == text_of(await posted(http, input="k1=pink; k2=red; k1="))


async def test_tools_and_grammars_work_in_pieces(connection: Connection, http: httpx.AsyncClient) -> None:
    colour = {"type": "object", "properties": {"c": {"enum": ["red", "blue"]}}, "required": ["c"]}
    grammar: dict[str, Any] = {"structured_outputs": {"regex": "(red|blue)-[0-9]{2}"}, "ignore_eos": False}
    tool = {"type": "function", "name": "paint", "parameters": colour}
    forced: dict[str, Any] = {
        "tools": [tool], "tool_choice": "required", "ignore_eos": False, "max_output_tokens": 60,
        "structured_outputs": None,
    }  # fmt: skip
    for wishes in (grammar, forced):
        await connection.create(**wishes, generate=False, input=PROMPT)
        await connection.ask("response.append", text="k2")
        pieces = response_of(await connection.ask("response.finish", text="="))
        whole = response_of(await streamed(http, **wishes, input=f"{PROMPT}k2="))
        kept = [[_of_item(item) for item in each["output"]] for each in (pieces, whole)]
        assert kept[0] == kept[1]
        assert kept[0]


def _of_item(item: dict[str, Any]) -> Any:
    return item.get("arguments") or [part["text"] for part in item["content"]]


# Stored.


async def test_a_stored_response_is_gone_on_from_read_and_deleted(
    gateway: str, http: httpx.AsyncClient, connection: Connection
) -> None:
    first = await connection.create(input=f"{PROMPT}k1=")
    unstored = await connection.create(input=f"{PROMPT}k1=", store=False)
    second = await posted(http, input="k17=", previous_response_id=first["id"])
    whole = [{"role": "user", "content": f"{PROMPT}k1="}, {"role": "assistant", "content": text_of(first)}]
    whole.append({"role": "user", "content": "k17="})
    assert text_of(second) == text_of(await posted(http, input=whole))
    async with connected(gateway) as other:
        third = await other.create(input="k9=", previous_response_id=second["id"])
        assert third["previous_response_id"] == second["id"]
        refused = json.dumps({"type": "response.create", "input": "x", "previous_response_id": unstored["id"]})
        assert (await other.refused(refused))[1] == "previous_response_not_found"
    assert (await http.get(f"/v1/responses/{third['id']}")).json() == third
    assert (await http.delete(f"/v1/responses/{third['id']}")).json()["deleted"] is True
    for response_id in (third["id"], unstored["id"], "resp_0", "x%20y"):
        assert (await http.get(f"/v1/responses/{response_id}")).status_code == 404
        assert (await http.delete(f"/v1/responses/{response_id}")).status_code == 404
    assert (
        await http.post("/v1/responses", json={**GREEDY, "input": "x", "previous_response_id": third["id"]})
    ).status_code == 404


@pytest.mark.leaves_less
async def test_a_stored_response_outlives_its_gateway(http: httpx.AsyncClient, target: Target) -> None:
    first = await posted(http, input=f"{PROMPT}k1=")
    assert target.pid is not None
    for child in psutil.Process(target.pid).children():
        if "gateway" in child.cmdline():
            child.kill()
            child.wait(30)

    async def is_back() -> bool:
        try:
            return (await http.get("/health")).status_code == 200
        except httpx.HTTPError:
            return False

    answers: list[Any] = []

    async def answers_again() -> bool:
        """A client's pool may still have a connection to the gateway that has gone; an answer of a status counts."""
        try:
            answers.append(await posted(http, input="k17=", previous_response_id=first["id"]))
        except httpx.TransportError:
            return False
        return True

    await until(is_back, "another gateway is up")
    await until(answers_again, "it answers")
    assert text_of(answers[0]).startswith("melon")
