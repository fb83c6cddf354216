"""The tools that people have, unchanged, against the HTTP APIs of a running service; and what goes wrong on the way."""

import asyncio
import functools
import json
import random
import re
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import jsonschema
import openai
import pytest
import pytest_asyncio
from rachis import AsyncClient, chat_prompt, text_prompt
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import generation_pb2 as generation

from tests.integration import secured
from tests.integration.conftest import until
from tests.integration.session_play import idle

pytestmark = pytest.mark.integration

MODEL = "rachis-builtin"
PROMPT = "k1=blue; k2=red; k17=melon; the sky; k9=pear; k1="
TURNS: Any = [{"role": "user", "content": PROMPT}]


@pytest_asyncio.fixture
async def openai_client(gateway: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{gateway}/v1", api_key=secured.key(), max_retries=0) as client:
        yield client


# Each beside the same request over gRPC.

SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0, "max_tokens": 6},
    {"temperature": 1, "seed": 7, "top_p": 0.9, "max_tokens": 24},
    {"temperature": 1, "seed": 3, "presence_penalty": 1.0, "frequency_penalty": 0.5, "max_tokens": 24},
    {"temperature": 0, "max_tokens": 40, "stop": ["e;", "lu"]},
    {"temperature": 0, "max_tokens": 12, "logit_bias": {59: -100, 32: 5}},
]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_openais_client_gets_the_text_that_grpc_gives(
    openai_client: openai.AsyncOpenAI, client: AsyncClient, sampling: dict[str, Any], is_streamed: bool
) -> None:
    expected = await client.generate(text_prompt(PROMPT), **sampling)
    chat = await client.generate(chat_prompt(TURNS), **sampling)
    if not is_streamed:
        completion = await openai_client.completions.create(model=MODEL, prompt=PROMPT, **sampling)
        answered = await openai_client.chat.completions.create(model=MODEL, messages=TURNS, **sampling)
        assert completion.choices[0].text == expected.text
        assert answered.choices[0].message.content == chat.text
        assert completion.usage is not None
        assert completion.usage.prompt_tokens == expected.completion.usage.prompt_tokens
        assert completion.usage.completion_tokens == len(expected.token_ids)
        return
    pieces = await openai_client.completions.create(model=MODEL, prompt=PROMPT, stream=True, **sampling)
    assert "".join([each.choices[0].text async for each in pieces]) == expected.text
    deltas = await openai_client.chat.completions.create(model=MODEL, messages=TURNS, stream=True, **sampling)
    assert "".join([each.choices[0].delta.content or "" async for each in deltas]) == chat.text


async def test_reasons_usage_and_log_probabilities_are_those_of_vllm(http: httpx.AsyncClient) -> None:
    async def completion(**wishes: Any) -> dict[str, Any]:
        body = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 30, **wishes}
        response = await http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        return dict(response.json())

    whole = await completion(max_tokens=6, logprobs=3, ignore_eos=True, return_token_ids=True)
    (choice,) = whole["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
    assert [len(each) for each in choice["logprobs"]["top_logprobs"]] == [3] * 6
    tokens = choice["token_ids"]
    by_string = (await completion(stop=["e;"], ignore_eos=True))["choices"][0]
    assert (by_string["finish_reason"], by_string["stop_reason"]) == ("stop", "e;")
    by_token = (await completion(stop_token_ids=[tokens[2]], ignore_eos=True))["choices"][0]
    assert (by_token["finish_reason"], by_token["stop_reason"]) == ("stop", tokens[2])
    long = "k1=blue; k2=red; k3=lime; " * 60 + "k2="
    await completion(prompt=long)
    assert (await completion(prompt=long))["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


async def test_choices_have_a_seed_each(http: httpx.AsyncClient, client: AsyncClient) -> None:
    sampling: dict[str, Any] = {"temperature": 1, "seed": 5, "max_tokens": 12}
    body = {"model": MODEL, "prompt": PROMPT, "n": 3, **sampling}
    answered = (await http.post("/v1/completions", json=body)).json()
    expected = await client.generate_choices(text_prompt(PROMPT), 3, **sampling)
    texts = {each["index"]: each["text"] for each in answered["choices"]}
    assert texts == {number: each.text for number, each in enumerate(expected)}


COLOUR: dict[str, Any] = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue", "lime"]}, "sure": {"type": "boolean"}},
    "required": ["colour", "sure"],
    "additionalProperties": False,
}
# JSON may have any number of them, and the model likes them.
NO_BLANKS = {197: -100, 198: -100, 201: -100, 220: -100}
TOOL: Any = {
    "type": "function",
    "function": {"name": "paint", "description": "Paints.", "parameters": COLOUR, "strict": True},
}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": TURNS, "stream": True}),
        ("/v1/completions", {"prompt": PROMPT}),
        ("/v1/messages", {"messages": TURNS}),
        ("/v1/responses", {"input": PROMPT}),
    ],
)
async def test_a_request_belongs_to_the_span_of_its_caller(
    http: httpx.AsyncClient, client: AsyncClient, path: str, body: dict[str, Any]
) -> None:
    trace_id = f"{random.getrandbits(128):032x}"
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    answer = await http.post(
        path, json={"model": MODEL, limit: 4, **body}, headers={"traceparent": f"00-{trace_id}-00f067aa0ba902b7-01"}
    )
    assert answer.status_code == 200
    await until(functools.partial(idle, client), "it has ended")
    assert (await client.admin.GetTrace(admin.GetTraceRequest(request_id=trace_id))).trace_id == trace_id


async def test_a_traceparent_that_is_none_breaks_nothing(http: httpx.AsyncClient) -> None:
    for hostile in ("x", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "é" * 9, "a" * 3000):
        answer = await http.post(
            "/v1/completions", json={"model": MODEL, "prompt": PROMPT, "max_tokens": 2},
            headers=[(b"traceparent", hostile.encode())],
        )  # fmt: skip
        assert answer.status_code == 200


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_answer_is_json_of_the_schema_that_was_asked_for(
    openai_client: openai.AsyncOpenAI, client: AsyncClient, is_streamed: bool
) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "colour", "schema": COLOUR}}
    greedy: Any = {"model": MODEL, "messages": TURNS, "temperature": 0, "max_tokens": 200, "logit_bias": NO_BLANKS}
    greedy["response_format"] = schema
    if is_streamed:
        deltas = await openai_client.chat.completions.create(stream=True, **greedy)
        text = "".join([each.choices[0].delta.content or "" async for each in deltas])
    else:
        text = (await openai_client.chat.completions.create(**greedy)).choices[0].message.content or ""
    jsonschema.validate(json.loads(text), COLOUR)
    wanted = generation.StructuredOutputs(json=json.dumps(COLOUR))
    over_grpc = await client.generate(
        chat_prompt(TURNS), temperature=0, max_tokens=200, logit_bias=NO_BLANKS, structured_outputs=wanted
    )
    assert over_grpc.text == text
    assert over_grpc.completion.route.handoff == generation.HANDOFF_OUTCOME_PULLED


async def test_a_tool_that_has_to_be_called_is_called_with_its_arguments(openai_client: openai.AsyncOpenAI) -> None:
    choice: Any = {"type": "function", "function": {"name": "paint"}}
    greedy: Any = {"model": MODEL, "messages": TURNS, "temperature": 0, "max_tokens": 300, "logit_bias": NO_BLANKS}
    answered = await openai_client.chat.completions.create(tools=[TOOL], tool_choice=choice, **greedy)
    called = answered.model_dump()["choices"][0]["message"]["tool_calls"][0]["function"]
    assert called["name"] == "paint"
    jsonschema.validate(json.loads(called["arguments"]), COLOUR)


async def test_the_other_kinds_over_http(http: httpx.AsyncClient) -> None:
    async def text_of(**wishes: Any) -> str:
        body = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 60, **wishes}
        response = await http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["text"])

    assert re.fullmatch("[a-f]{3}-[0-9]{2}", await text_of(structured_outputs={"regex": "[a-f]{3}-[0-9]{2}"}))
    assert await text_of(structured_outputs={"choice": ["red", "lime"]}) in ("red", "lime")
    assert re.fullmatch("x*y", await text_of(structured_outputs={"grammar": 'root ::= "x" root | "y"'}))
    assert (await text_of()).startswith("blue")
    assert not (await text_of(bad_words=["blue"])).startswith("blue")


async def test_anthropics_client_and_openais_responses(
    gateway: str, openai_client: openai.AsyncOpenAI, client: AsyncClient
) -> None:
    expected = (await client.generate(chat_prompt(TURNS), temperature=0, max_tokens=6)).text
    responded = await openai_client.responses.create(model=MODEL, input=PROMPT, temperature=0, max_output_tokens=6)
    assert responded.output_text == expected
    async with anthropic.AsyncAnthropic(base_url=gateway, api_key=secured.key(), max_retries=0) as claude:
        greedy: Any = {"model": MODEL, "messages": TURNS, "max_tokens": 6, "extra_body": {"temperature": 0}}
        message = await claude.messages.create(**greedy)
        assert [each.text for each in message.content if each.type == "text"] == [expected]
        async with claude.messages.stream(**greedy) as stream:
            assert "".join([text async for text in stream.text_stream]) == expected
        assert (await claude.messages.count_tokens(model=MODEL, messages=TURNS)).input_tokens > 10


async def test_what_is_beside_generating(http: httpx.AsyncClient) -> None:
    (model,) = (await http.get("/v1/models")).json()["data"]
    assert (model["id"], model["max_model_len"]) == (MODEL, 4096)
    tokens = (await http.post("/tokenize", json={"model": MODEL, "prompt": PROMPT})).json()["tokens"]
    detokenized = await http.post("/detokenize", json={"model": MODEL, "tokens": tokens})
    assert detokenized.json()["prompt"] == PROMPT
    assert "vllm:prompt_tokens_total" in (await http.get("/metrics")).text


# Refusals.


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("wishes", "status", "said"),
    [
        ({"temperature": -1}, 400, "temperature"),
        ({"prompt": "k1=blue; " * 2000}, 400, "4096"),
        ({"model": "another"}, 404, "another"),
        ({"logit_bias": {"399999": -100}}, 400, "399999"),
        ({"allowed_token_ids": [399_999]}, 400, "allowed_token_ids"),
        ({"structured_outputs": {"regex": "bad ("}}, 400, "parenthesis"),
        ({"structured_outputs": {"json": '{"type": "integer", "multipleOf": 3}'}}, 400, "not supported"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, 400, "whitespace_pattern"),
        ({"structured_outputs": {"choice": ["red"] * 1025}}, 400, "1024"),
        ({"bad_words": [f"x{number}" for number in range(65)]}, 400, "bad_words"),
        ({"vllm_xargs": {"rachis_emitted": [59]}}, 400, "extra_args"),
        ({"kv_transfer_params": {"do_remote_decode": True}}, 400, "extra_args"),
        ({"repetition_penalty": 1001.0}, 400, "repetition_penalty"),
        ({"prompt_logprobs": 50}, 400, "prompt"),
        ({"prompt": [399_999]}, 400, "399999"),
    ],
)
async def test_bad_input_has_its_status_before_a_stream_begins(
    http: httpx.AsyncClient, wishes: dict[str, Any], status: int, said: str, is_streamed: bool
) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 6, "stream": is_streamed, **wishes}
    response = await http.post("/v1/completions", json=body)
    assert response.status_code == status, response.text
    assert response.headers["content-type"].startswith("application/json")
    assert said in response.json()["error"]["message"]


async def test_a_body_that_is_no_json_or_of_wrong_types_is_refused(http: httpx.AsyncClient) -> None:
    headers = {"content-type": "application/json"}
    assert (await http.post("/v1/completions", content="{not json", headers=headers)).status_code == 400
    assert (await http.post("/v1/completions", json={"model": MODEL, "max_tokens": "x"})).status_code == 400
    assert (await http.post("/v1/chat/completions", json={"model": MODEL, "messages": []})).status_code == 400


async def test_who_leaves_a_stream_leaves_nothing_at_the_workers(http: httpx.AsyncClient, client: AsyncClient) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 3000, "ignore_eos": True, "stream": True, "n": 2}
    async with http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.aiter_lines()
        for _ in range(4):
            await anext(lines)
        assert any(view.in_flight_requests for view in await client.workers())
    await until(functools.partial(idle, client), "nothing is left")


async def test_many_at_once_are_those_of_one_after_the_other(openai_client: openai.AsyncOpenAI) -> None:
    async def ask(number: int) -> str:
        prompt = f"k1=blue; k{number}=red; k{number}="
        answered = await openai_client.completions.create(model=MODEL, prompt=prompt, max_tokens=8, temperature=0)
        return answered.choices[0].text

    together = await asyncio.gather(*map(ask, range(24)))
    assert together == [await ask(number) for number in range(24)]
