"""Answers that are broken off anywhere and resumed, on real engines, against the same ones in one go."""

import random
from contextlib import aclosing
from typing import Any

import grpc
import pytest
from rachis import AsyncClient, Generated, Received, token_prompt
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import router_pb2 as api

from benchmarks.chaos_streams import KINDS, ranked
from tests.integration.conftest import all_blocks_free, until

pytestmark = pytest.mark.integration

_TOKENS = 24


def _case(rng: random.Random, kind: str) -> tuple[list[int], dict[str, Any]]:
    prompt = [rng.randrange(250) for _ in range(rng.randint(20, 300))]
    return prompt, {**KINDS[kind], "max_tokens": _TOKENS, "seed": rng.randrange(1 << 30)}


async def _with_stop(client: AsyncClient, prompt: list[int], sampling: dict[str, Any]) -> dict[str, Any]:
    """A stop string that its answer has three quarters through."""
    text = (await client.generate(token_prompt(prompt), **sampling)).text
    return {**sampling, "stop": [text[len(text) * 3 // 4 :][:3] or "never"]}


async def _resumed(client: AsyncClient, prompt: list[int], sampling: dict[str, Any], cut: int) -> Generated:
    """The answer of a client that leaves after `cut` tokens, and asks for the rest."""
    request = api.GenerateRequest(prompt=token_prompt(prompt), sampling=generation.SamplingParams(**sampling))
    whole, received = Generated(), Received()
    first = client.call(request)
    async for response in first:
        if response.HasField("delta"):
            whole.add(response.delta)
            received.add(response.delta)
        if len(received) >= cut:
            break
    first.cancel()
    async for response in client.resume(request, [received]):
        if response.HasField("delta"):
            whole.add(response.delta)
        else:
            whole.completion = response.completion
    return whole


@pytest.mark.parametrize("kind", list(KINDS))
async def test_a_resumed_answer_is_that_of_one_go(client: AsyncClient, kind: str) -> None:
    rng = random.Random(kind)
    for _ in range(4):
        prompt, sampling = _case(rng, kind)
        if kind == "stops":
            sampling = await _with_stop(client, prompt, sampling)
        expected = await client.generate(token_prompt(prompt), **sampling)
        cut = rng.randint(1, len(expected.token_ids))

        got = await _resumed(client, prompt, sampling, cut)

        assert (got.token_ids, got.text) == (expected.token_ids, expected.text), cut
        assert got.completion.finish_reason == expected.completion.finish_reason
        assert got.completion.usage.completion_tokens == expected.completion.usage.completion_tokens
        assert ranked(got) == ranked(expected)
    await until(lambda: all_blocks_free(client), "all blocks free")


async def test_the_session_of_a_resumed_answer_is_sent_again(client: AsyncClient) -> None:
    prompt, sampling = _case(random.Random(3), "seeded")
    expected = await client.generate(token_prompt(prompt), **sampling)
    async with client.session(prompt[:10], **sampling) as session:
        await session.append(prompt[10:])
        got = Generated()
        async with aclosing(session.finish()) as deltas:
            delta: generation.CompletionDelta
            async for delta in deltas:
                got.add(delta)
                if len(session.received) >= 5:
                    break
    received, had = session.received, len(session.received)
    again = client.session(prompt[:10], received=received, **sampling)
    async with again as session:
        await session.append(prompt[10:])
        async for delta in session.finish():
            got.add(delta)

    assert (got.token_ids, got.text) == (expected.token_ids, expected.text)
    assert again.completion.route.resumed_tokens == had < len(received) == 24


async def test_an_answer_with_a_stop_string_in_it_is_not_gone_on_with(client: AsyncClient) -> None:
    """A client that leaves the reason to end out is told; it would get tokens after the end."""
    prompt, sampling = _case(random.Random(5), "stops")
    sampling = await _with_stop(client, prompt, sampling)
    whole = await client.generate(token_prompt(prompt), **sampling)
    request = api.GenerateRequest(prompt=token_prompt(prompt), sampling=generation.SamplingParams(**sampling))
    received = Received()
    received.add(generation.CompletionDelta(token_ids=whole.token_ids, text=whole.text))

    with pytest.raises(grpc.aio.AioRpcError) as refused:
        async for _ in client.resume(request, [received]):
            pass

    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
