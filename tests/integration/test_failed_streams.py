"""What is refused or fails, through vLLM's routes over a cluster in this process: with its own status, or in order."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass, field
from pathlib import Path
from string import ascii_lowercase
from typing import Any, cast

import httpx
import openai
import pytest
import pytest_asyncio
from fastapi.responses import JSONResponse
from rachis import AsyncClient
from rachis.v1 import router_pb2 as api
from rachis.v1 import worker_pb2 as wire

import builtin_model
from control_plane.gateway import front, gateway
from control_plane.gateway.router_core import RouterCore
from control_plane.gateway.stored_http import StoringResponses
from control_plane.gateway.stored_record import Record
from control_plane.intake.validation import MAX_CHOICES
from tests.fakes.cluster import DECODE, MODEL, PREFILL, Cluster, Worker, running_cluster, until

pytestmark = pytest.mark.integration

QUESTION: dict[str, Any] = {"model": "fake", "stream": True}
RESPONSE: dict[str, Any] = {**QUESTION, "input": "a", "max_output_tokens": 40, "temperature": 0}
CHAT: dict[str, Any] = {**QUESTION, "messages": [{"role": "user", "content": "a"}], "max_tokens": 40, "temperature": 0}
ROUTES = {"/v1/responses": RESPONSE, "/v1/chat/completions": CHAT, "/v1/messages": CHAT}
SAYS_TEXT = {
    "/v1/responses": b"event: response.output_text.delta",
    "/v1/messages": b"event: content_block_delta",
}
WEIGHTS = Path(builtin_model.__file__).parent / "weights"
LOST = "no decode worker was ready for 0.2 s"
PAGE = "https://page.example"
MOST_BYTES = 10_000


class Store:
    """In place of Redis."""

    def __init__(self) -> None:
        self.records: dict[str, Record] = {}

    async def store(self, record: Record) -> None:
        self.records[record.response_id] = record

    async def find(self, response_id: str) -> Record | None:
        return self.records.get(response_id)


class Doorkeeper:
    """In place of the middleware that finds out who asks."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        is_known = scope["type"] != "http" or (b"authorization", b"nobody") not in scope["headers"]
        await (self._app if is_known else JSONResponse({}, status_code=401))(scope, receive, send)


class Heard:
    """The app, and what it has sent of all bodies."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self.body = b""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def noted(message: Any) -> None:
            self.body += message.get("body", b"")
            await send(message)

        await self._app(scope, receive, noted)


@dataclass
class Gateway:
    """decode: the only decode worker, new for each test."""

    cluster: Cluster
    heard: Heard
    http: httpx.AsyncClient
    store: Store = field(default_factory=Store)
    decode: Worker = field(init=False)
    asked: int = 0

    async def ask(self, path: str, **fields: Any) -> httpx.Response:
        return await self.http.post(path, json={**ROUTES[path], **self.question(path), **fields})

    def question(self, path: str) -> dict[str, Any]:
        """Another one in each test: one that engines die of is refused."""
        self.asked += 1
        text = f"question {self.asked}"
        return {"input": text} if path == "/v1/responses" else {"messages": [{"role": "user", "content": text}]}

    async def lost_after(self, text: bytes, asking: Awaitable[Any]) -> Any:
        """What becomes of a call whose worker is lost once its client has this."""
        self.heard.body = b""
        self.decode.engine.hold_before(30)
        task = asyncio.ensure_future(asking)
        await until(lambda: text in self.heard.body or task.done())
        self.decode.engine.die("of a test")
        return await task


@pytest_asyncio.fixture(scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    async with running_cluster(
        router__max_in_flight_requests=1, router__max_queued_requests=1, router__queue_timeout_s=0.2
    ) as cluster:
        await cluster.add(PREFILL, model=as_the_tokenizer())
        async with AsyncClient(cluster.router.address) as client:
            path = with_letters(tmp_path_factory.mktemp("tokenizer"))
            model = api.ServedModel(name="fake", tokenizer=str(path), max_model_len=MODEL.max_model_len)
            args = front.parsed([*gateway.front_arguments(model, "127.0.0.1", 0), "--allowed-origins", f'["{PAGE}"]'])
            engine = front.make_engine(args, RouterCore(client))
            app = await front.make_app(args, engine, Doorkeeper, MOST_BYTES)
            # As `serve` has it; vLLM would stop it with its engine.
            app.state.server = None
            heard = Heard(app)
            async with httpx.AsyncClient(transport=httpx.ASGITransport(heard), base_url="http://gateway") as http:
                found = Gateway(cluster, heard, http)
                serving = app.state.openai_serving_responses
                app.state.openai_serving_responses = StoringResponses(serving, cast(Any, found.store))
                yield found
            engine.shutdown()
        # Its calls are the gateway's.
        cluster.calls = sum(cluster.outcomes.values())


@pytest_asyncio.fixture
async def served(running: Gateway) -> AsyncIterator[Gateway]:
    running.store.records.clear()
    running.decode = await running.cluster.add(DECODE, model=as_the_tokenizer())
    yield running
    running.decode.engine.resume()
    await until(lambda: running.cluster.parts.admission.in_flight == 0)
    await running.cluster.unregister(running.decode)


def with_letters(folder: Path) -> Path:
    """The built-in model's tokenizer, with the letters that the fake engines generate in their places."""
    for name in ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"):
        shutil.copy(WEIGHTS / name, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    for letter in ascii_lowercase:
        other = next(token for token, number in vocabulary.items() if number == ord(letter))
        vocabulary[letter], vocabulary[other] = ord(letter), vocabulary[letter]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def as_the_tokenizer() -> wire.ModelInfo:
    model = wire.ModelInfo()
    model.CopyFrom(MODEL)
    model.vocabulary_size = 400
    return model


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    """Of a stream; each has the name that its type says."""
    assert answer.status_code == 200, answer.text
    found = []
    for block in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


# Before anything was generated.


async def test_a_response_that_ends_well_is_streamed_and_stored(served: Gateway) -> None:
    said = events(await served.ask("/v1/responses"))
    assert [each["type"] for each in said[:3]] == [
        "response.created", "response.in_progress", "response.output_item.added",
    ]  # fmt: skip
    assert said[-1]["type"] == "response.completed"
    assert [record.response["status"] for record in served.store.records.values()] == ["incomplete"], (
        "it has as many tokens as it might"
    )


@pytest.mark.parametrize("path", ROUTES)
async def test_an_overload_is_429_and_says_when_to_try_again(served: Gateway, path: str) -> None:
    served.decode.engine.hold_before(0)
    first = asyncio.create_task(served.ask("/v1/responses", store=False))
    await until(lambda: served.cluster.parts.admission.in_flight == 1)
    streamed, whole = await served.ask(path), await served.ask(path, stream=False)
    assert [answer.status_code for answer in (streamed, whole)] == [429, 429]
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in (streamed, whole))
    assert streamed.json() == whole.json()
    assert served.store.records == {}, "nobody has its id"
    served.decode.engine.resume()
    await first


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions"])
async def test_a_field_that_is_refused_is_400_by_its_name(served: Gateway, path: str) -> None:
    streamed, whole = (
        await served.ask(path, priority=3_000_000),
        await served.ask(path, priority=3_000_000, stream=False),
    )
    assert (streamed.status_code, streamed.json()) == (400, whole.json())
    assert streamed.json()["error"]["param"] == "priority"


@pytest.mark.parametrize("path", ROUTES)
async def test_no_worker_is_503_and_says_when_to_try_again(served: Gateway, path: str) -> None:
    await served.cluster.unregister(served.decode)
    streamed, whole = await served.ask(path), await served.ask(path, stream=False)
    assert [answer.status_code for answer in (streamed, whole)] == [503, 503]
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in (streamed, whole))
    assert streamed.json() == whole.json()
    await served.cluster.register(served.decode.record)


async def test_a_request_that_engines_die_of_is_refused_with_the_routers_sentence(served: Gateway) -> None:
    asked: dict[str, Any] = {"input": "deadly"}
    for _ in range(2):
        dies = served.decode.will_die()
        await served.ask("/v1/responses", **asked)
        await dies
        await served.cluster.unregister(served.decode)
        served.decode = await served.cluster.add(DECODE, model=as_the_tokenizer())
    answers = [await served.ask("/v1/responses", **asked, stream=streams) for streams in (True, False)]
    assert [answer.status_code for answer in answers] == [500, 500]
    assert all(answer.json()["error"]["message"].startswith("2 engines died") for answer in answers)


@pytest.mark.parametrize("path", ROUTES)
async def test_a_body_that_is_too_large_is_413(served: Gateway, path: str) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b"x" * 4_000

    headers = {"content-type": "application/json"}
    for body in (b"x" * (MOST_BYTES + 1), pieces()):
        answer = await served.http.post(path, content=body, headers=headers)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (413, 413)
        assert error["message"] == "The request's body has more than 10000 bytes, which is the limit."


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_more_choices_than_a_request_may_have_are_refused(served: Gateway, path: str) -> None:
    asked = {**CHAT, "prompt": "a", "temperature": 1, "n": MAX_CHOICES + 1}
    answer = await served.http.post(path, json=asked)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("n must be at most 16, got 17.")


async def test_a_page_that_may_ask_can_read_why_it_is_refused(served: Gateway) -> None:
    headers = {"origin": PAGE, "authorization": "nobody"}
    refused = await served.http.get("/v1/models", headers=headers)
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, PAGE)
    other = await served.http.get("/v1/models", headers={**headers, "origin": "https://other.example"})
    assert (other.status_code, "access-control-allow-origin" in other.headers) == (401, False)


@pytest.mark.parametrize("skips", [False, True])
async def test_stop_strings_end_an_answer_with_and_without_special_tokens(served: Gateway, skips: bool) -> None:
    whole = (await served.ask("/v1/chat/completions", stream=False)).json()["choices"][0]["message"]["content"]
    stop = whole[10:13]
    asked: dict[str, Any] = {"stream": False, "stop": [stop], "skip_special_tokens": skips}
    served.asked -= 1
    choice = (await served.ask("/v1/chat/completions", **asked)).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == (
        whole[: whole.index(stop)], "stop", stop,
    )  # fmt: skip
    assert [len(job.sampling.stop) for job in served.decode.engine.jobs][-1] == skips


# In the midst.


async def test_a_response_that_fails_in_the_midst_says_so_and_is_stored_as_failed(served: Gateway) -> None:
    said = events(await served.lost_after(SAYS_TEXT["/v1/responses"], served.ask("/v1/responses")))
    assert [each["sequence_number"] for each in said] == list(range(len(said)))
    *before, error, failed = said
    assert {"response.created", "response.output_text.delta"} <= {each["type"] for each in before}
    assert [(each["code"], each["message"]) for each in (error, error["error"])] == [("server_overloaded", LOST)] * 2
    assert error["status"] == 503
    assert int(error["error"]["headers"]["Retry-After"]) >= 1
    assert failed["response"] == {
        **before[0]["response"], "status": "failed", "error": {"code": "server_overloaded", "message": LOST},
    }  # fmt: skip
    kept = served.store.records[failed["response"]["id"]]
    assert kept.response == failed["response"]
    assert len(kept.items) == 1, "it may be gone on from, as if it had said nothing"


async def test_openais_client_raises_what_has_failed(served: Gateway) -> None:
    http = cast(Any, served.http)
    client = openai.AsyncOpenAI(base_url="http://gateway/v1", api_key="none", http_client=http, max_retries=0)
    seen: list[str] = []

    async def asked() -> None:
        async for event in await client.responses.create(**{**RESPONSE, **served.question("/v1/responses")}):
            seen.append(event.type)

    with pytest.raises(openai.APIError, match=LOST) as raised:
        await served.lost_after(SAYS_TEXT["/v1/responses"], asked())
    assert (raised.value.code, seen[-1]) == ("server_overloaded", "response.output_text.delta")


async def test_a_message_that_fails_in_the_midst_says_why(served: Gateway) -> None:
    said = events(await served.lost_after(SAYS_TEXT["/v1/messages"], served.ask("/v1/messages")))
    assert said[-1] == {"type": "error", "error": {"type": "Service Unavailable", "message": LOST}}
    assert [each["type"] for each in said].count("error") == 1
