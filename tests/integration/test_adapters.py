"""LoRA adapters over both pools of a service: tokens are those of one plain vLLM with the same adapter."""

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
import pytest_asyncio
from rachis import AsyncClient, RachisError, token_prompt
from rachis.errors import InvalidInputError
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire
from rachis.v1 import worker_pb2_grpc

from benchmarks.plain_engine import plain_engine
from cluster_configs.loading import load
from cluster_core.ports import hold_port
from tests.integration import secured
from tests.integration.conftest import all_blocks_free, came_back, keys_of, own_service, until, worker_of
from tests.lora_adapters import write_adapter

pytestmark = pytest.mark.integration

LORA: dict[str, Any] = {"lora__max_loaded": 3, "lora__max_in_batch": 1, "lora__max_rank": 8}
EVERYWHERE = {"prefill-0", "decode-0", "decode-1"}
PREFIX = [(7 * place) % 250 for place in range(150)]


@dataclass
class World:
    """paths: folders of adapters. plain: one vLLM alone, with the adapters that the service has."""

    client: AsyncClient
    plain: "worker_pb2_grpc.WorkerServiceAsyncStub"
    paths: dict[str, str]
    gateway_port: int
    loaded: dict[str, wire.Adapter] = field(default_factory=dict)

    async def load(self, name: str, path: str) -> wire.Adapter:
        request = admin.LoadAdapterRequest(name=name, path=path)
        response = await self.client.admin.LoadAdapter(request, timeout=120)
        self.loaded[name] = response.adapter
        return self.loaded[name]

    async def unload(self, name: str) -> list[str]:
        request = admin.UnloadAdapterRequest(name=name)
        return list((await self.client.admin.UnloadAdapter(request, timeout=30)).left_at)

    async def adapters(self) -> dict[str, set[str]]:
        """By name, the workers that have it loaded."""
        response = await self.client.admin.ListAdapters(admin.ListAdaptersRequest(), timeout=10)
        self.loaded.update({view.adapter.name: view.adapter for view in response.adapters})
        return {view.adapter.name: set(view.worker_ids) for view in response.adapters}

    async def expected(self, prompt: list[int], model: str, **sampling: Any) -> list[int]:
        request = wire.DecodeRequest(
            request_id=os.urandom(8).hex(),
            token_ids=prompt,
            sampling=generation.SamplingParams(**sampling),
            adapter=self.loaded[model] if model else None,
            cache_salt=os.urandom(8).hex(),
        )
        tokens: list[int] = []
        async for response in self.plain.Decode(request, timeout=500):
            tokens += response.delta.token_ids
            tokens += response.end.delta.token_ids
        return tokens


@pytest_asyncio.fixture(scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    folder = tmp_path_factory.mktemp("adapters")
    paths = {name: write_adapter(folder / name, seed) for seed, name in enumerate(("a", "b", "c", "d"))}
    paths["wide"] = write_adapter(folder / "wide", 9, rank=16)
    port = hold_port("127.0.0.1")
    flags = {
        **LORA, "lora__adapters": [f"a={paths['a']}"], "pools__decode__workers": 2, "gateway__port": port,
        "placement__policy": "hotness",
    }  # fmt: skip
    state = tmp_path_factory.mktemp("state")
    async with (
        plain_engine(load(flags=keys_of(LORA)).config) as (address, _),
        grpc.aio.insecure_channel(address) as channel,
        own_service(state, **flags) as (_, client),
    ):
        made = World(client, worker_pb2_grpc.WorkerServiceStub(channel), paths, port)
        await made.load("b", paths["b"])
        # Workers tell the registry by and by what they have loaded.
        await until(lambda: _is({"a": EVERYWHERE, "b": EVERYWHERE}, made), "the registry says where both are")
        yield made


async def test_those_of_the_configuration_are_loaded_at_every_worker_and_others_at_run_time(world: World) -> None:
    assert await world.adapters() == {"a": EVERYWHERE, "b": EVERYWHERE}
    loaded = world.loaded["b"]
    assert len(loaded.digest) == 64
    assert await world.load("b", world.paths["b"]) == loaded, "again is harmless"


async def _is(wanted: dict[str, set[str]], world: World) -> bool:
    return await world.adapters() == wanted


async def test_mixed_requests_have_the_tokens_of_plain_vllm(world: World) -> None:
    """Choices, seeds, sessions of both modes, prompts that begin alike under other adapters; all at once."""
    await world.adapters()
    rng = random.Random(5)
    trials = [_trial(rng) for _ in range(48)]
    found = await asyncio.gather(*(_answer(world, *trial) for trial in trials))
    plain = (world.expected(prompt, model, **sampling) for prompt, model, sampling, _ in trials)
    outcomes = set()
    for trial, (tokens, handoff), expected in zip(trials, found, await asyncio.gather(*plain), strict=True):
        assert tokens == expected, trial
        outcomes.add(handoff)
    assert generation.HANDOFF_OUTCOME_PULLED in outcomes
    assert generation.HANDOFF_OUTCOME_RECOMPUTED not in outcomes
    await until(lambda: all_blocks_free(world.client), "nothing is held")


Trial = tuple[list[int], str, dict[str, Any], str]


def _trial(rng: random.Random) -> Trial:
    prompt = PREFIX[: rng.choice((40, 100, 150))] + [rng.randrange(250) for _ in range(rng.randrange(1, 60))]
    sampling = {"max_tokens": rng.randrange(2, 30), "ignore_eos": True, "temperature": 0.0}
    if rng.random() < 0.4:
        sampling |= {"temperature": 0.9, "seed": rng.randrange(99), "presence_penalty": 0.5}
    return prompt, rng.choice(("", "a", "b")), sampling, rng.choice(("whole", "whole", "append", "update"))


async def _answer(
    world: World, prompt: list[int], model: str, sampling: dict[str, Any], way: str
) -> tuple[list[int], generation.HandoffOutcome.ValueType]:
    if way == "whole":
        answer = await world.client.generate(token_prompt(prompt), model=model, **sampling)
        return list(answer.token_ids), answer.completion.route.handoff
    half = len(prompt) // 2
    async with world.client.session(mode=way, model=model, **sampling) as session:  # type: ignore[arg-type]
        if way == "append":
            await session.append(prompt[:half])
        else:
            await session.update([[*prompt[:half], 1, 2, 3]])
            await session.update([prompt[:half]])
        tokens = [token async for delta in session.finish(prompt[half:]) for token in delta.token_ids]
        return tokens, session.completion.route.handoff


async def test_choices_of_an_adapter(world: World) -> None:
    sampling = {"max_tokens": 8, "temperature": 0.9, "ignore_eos": True}
    found = await world.client.generate_choices(token_prompt(PREFIX), 2, model="a", seed=3, **sampling)
    for choice, answer in enumerate(found):
        assert answer.token_ids == await world.expected(PREFIX, "a", seed=3 + choice, **sampling)


async def test_an_answer_goes_on_at_another_worker_and_one_that_comes_back_loads_what_it_is_asked_for(
    world: World,
) -> None:
    sampling = {"max_tokens": 600, "temperature": 0.0, "ignore_eos": True}
    asked = [([seed, *PREFIX], model) for seed, model in enumerate(("a", "b", "", "a"))]
    streams = [
        asyncio.create_task(world.client.generate(token_prompt(prompt), model=model, **sampling))
        for prompt, model in asked
    ]
    await until(lambda: _decodes(world.client, "decode-0"), "it has some of them")
    pid, before = await worker_of(world.client, "decode-0")
    os.kill(pid, signal.SIGKILL)
    answers = await asyncio.gather(*streams)
    plain = await asyncio.gather(*(world.expected(prompt, model, **sampling) for prompt, model in asked))
    assert [answer.token_ids for answer in answers] == plain
    assert sum(answer.completion.route.migrations for answer in answers) > 0
    await came_back(world.client, "decode-0", before)
    await until(lambda: all_blocks_free(world.client), "nothing is held")

    pid, before = await worker_of(world.client, "prefill-0")
    os.kill(pid, signal.SIGKILL)
    await came_back(world.client, "prefill-0", before)
    assert "prefill-0" not in (await world.adapters())["b"]
    answer = await world.client.generate(token_prompt(PREFIX), model="b", max_tokens=5, temperature=0.0)
    assert answer.token_ids == await world.expected(PREFIX, "b", max_tokens=5, temperature=0.0)
    assert answer.completion.route.prefill_worker_id == "prefill-0"
    await until(lambda: _has("prefill-0", "b", world), "the registry says so")


async def _decodes(client: AsyncClient, worker_id: str) -> bool:
    return any(
        view.load.running_requests for view in await client.workers() if view.registration.worker_id == worker_id
    )


async def _has(worker_id: str, name: str, world: World) -> bool:
    return worker_id in (await world.adapters())[name]


async def test_over_http_an_adapter_is_a_model(world: World) -> None:
    base = f"{secured.SCHEME}://127.0.0.1:{world.gateway_port}/v1"
    async with openai.AsyncOpenAI(base_url=base, api_key=secured.key(), max_retries=0) as http:
        await until(lambda: _lists(http, {"rachis-builtin", "a", "b"}), "the gateway is up, and knows them")
        prompt: Any = PREFIX
        for model in ("a", "b", "rachis-builtin"):
            answer = await http.completions.create(model=model, prompt=prompt, max_tokens=6, temperature=0)
            name = "" if model == "rachis-builtin" else model
            direct = await world.client.generate(token_prompt(PREFIX), model=name, max_tokens=6, temperature=0.0)
            assert (answer.model, answer.choices[0].text) == (model, direct.text)
        turns: Any = [{"role": "user", "content": "k1=blue; k1="}]
        chat = await http.chat.completions.create(model="a", messages=turns, max_tokens=6, temperature=0)
        response = await http.responses.create(model="a", input=turns, max_output_tokens=6, temperature=0)
        assert chat.choices[0].message.content == response.output_text
        async with http.responses.connect() as socket:
            wishes = {"generate": False, "temperature": 0, "max_output_tokens": 6}
            opening: Any = {"type": "response.create", "model": "a", "input": "k1=blue; ", **wishes}
            await socket.send(opening)
            closing: Any = {"type": "response.finish", "text": "k1="}
            await socket.send(closing)
            said = ""
            async for event in socket:
                if event.type == "response.completed" and event.response.output:
                    said = event.response.output_text
                    break
        assert said == response.output_text, "a session of the model alone would say something else"
        with pytest.raises(openai.NotFoundError, match="The model `z` does not exist"):
            await http.completions.create(model="z", prompt="x")


async def _lists(http: openai.AsyncOpenAI, wanted: set[str]) -> bool:
    try:
        return {model.id async for model in http.models.list()} == wanted
    except openai.APIConnectionError:
        return False


async def test_what_cannot_be_loaded_is_refused_by_name_and_changes_nothing(world: World, tmp_path: Path) -> None:
    before = await world.adapters()
    (tmp_path / "adapter_config.json").write_text("{")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"no weights")
    wide = world.paths["wide"]
    for name, path, status, why in (
        ("x y", world.paths["c"], "INVALID_ARGUMENT", "name: a name has 1 to 64 letters"),
        ("rachis-builtin", world.paths["c"], "INVALID_ARGUMENT", "is the model itself"),
        ("c", "", "INVALID_ARGUMENT", "path: must be 1 to 4096 printable characters"),
        ("c", "/no/such/folder", "INVALID_ARGUMENT", "path: .*there is no adapter at /no/such/folder"),
        ("c", str(tmp_path), "INVALID_ARGUMENT", "path: .*adapter `c` cannot be loaded"),
        ("c", wide, "INVALID_ARGUMENT", "path: .*adapter `c` cannot be loaded: .*rank"),
        ("a", world.paths["c"], "INVALID_ARGUMENT", "`a` is another adapter already, from .*: unload that first"),
    ):
        with pytest.raises(grpc.aio.AioRpcError, match=why) as raised:
            await world.load(name, path)
        assert raised.value.code().name == status
    await world.load("c", world.paths["c"])
    with pytest.raises(grpc.aio.AioRpcError, match=r"there are 3 adapters already, lora\.max_loaded is 3") as raised:
        await world.load("d", world.paths["d"])
    assert raised.value.code() is grpc.StatusCode.OUT_OF_RANGE
    assert await world.unload("c") == []
    await until(lambda: _is(before, world), "as before, at the workers as well")
    with pytest.raises(grpc.aio.AioRpcError, match="no adapter `c`; there are: a, b"):
        await world.unload("c")
    with pytest.raises(InvalidInputError, match="unknown model `c`; this cluster serves `rachis-builtin`, `a`, `b`"):
        await world.client.generate(token_prompt(PREFIX), model="c")


async def test_another_adapter_under_a_name_shares_nothing_with_the_one_before(world: World) -> None:
    sampling = {"max_tokens": 6, "temperature": 0.0}
    prompt = [9, *PREFIX]
    before = await world.client.generate(token_prompt(prompt), model="b", **sampling)
    running = asyncio.create_task(
        world.client.generate(token_prompt(prompt), model="b", max_tokens=1000, temperature=0.0, ignore_eos=True)
    )
    await until(lambda: _busy(world.client), "it runs")
    expected = await world.expected(prompt, "b", max_tokens=1000, temperature=0.0, ignore_eos=True)
    await world.unload("b")
    with pytest.raises(RachisError, match="unknown model `b`"):
        await world.client.generate(token_prompt(prompt), model="b", **sampling)
    await world.load("b", world.paths["d"])
    after = await world.client.generate(token_prompt(prompt), model="b", **sampling)
    assert after.completion.usage.cached_tokens == 0
    assert after.token_ids == await world.expected(prompt, "b", **sampling)
    assert after.token_ids != before.token_ids
    assert (await running).token_ids == expected, "what ran goes on as what it was"
    await until(lambda: all_blocks_free(world.client), "nothing is held")


async def _busy(client: AsyncClient) -> bool:
    return any(view.load.running_requests for view in await client.workers())


async def test_placement_and_index_tell_adapters_apart(world: World) -> None:
    prompt = generation.PromptInput(token_ids=generation.TokenIds(ids=PREFIX))
    await world.client.generate(token_prompt(PREFIX), model="a", max_tokens=4, temperature=0.0)

    async def held(model: str) -> int:
        request = admin.LookupPrefixRequest(prompt=prompt, model=model, cache_salt="nobody's" if not model else "")
        found = await world.client.admin.LookupPrefix(request, timeout=10)
        return max(worker.device_tokens for worker in found.workers)

    async def is_told() -> bool:
        return await held("a") > 0

    await until(is_told, "the index has its chunks")
    assert await held("") == 0
    asked = admin.ExplainPlacementRequest(supposed=admin.SupposedRequest(prompt=prompt, model="a"))
    explained = await world.client.admin.ExplainPlacement(asked, timeout=10)
    terms = [candidate.terms for decision in explained.decisions for candidate in decision.candidates]
    assert any("adapter" in each for each in terms)
    with pytest.raises(grpc.aio.AioRpcError, match="unknown model `z`"):
        await world.client.admin.LookupPrefix(admin.LookupPrefixRequest(prompt=prompt, model="z"), timeout=10)
