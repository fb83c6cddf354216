"""The whole service on real parts: two vLLM engines, NIXL between them, Ray, Redis, gRPC."""

import asyncio
import random
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from rachis import AsyncClient, chat_prompt, text_prompt, token_prompt
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import router_pb2 as api
from rachis.v1 import worker_pb2 as wire

from benchmarks import identity
from benchmarks.direct_call import DirectWorker
from benchmarks.plain_engine import GENERATION, plain_engine
from builtin_model import recall
from cluster_configs.loading import LoadedConfig
from command_line.own_service import Target
from control_plane.intake.tokenization import Tokenizer
from tests.integration import secured
from tests.integration.conftest import all_blocks_free, until
from tests.structured.compared import compared

pytestmark = pytest.mark.integration

PROMPTS = 40
# Also over the hand-off; 300 by `python -m tests.structured`.
GRAMMARS = 40


async def test_recall_questions_are_answered_right_through_both_pools(client: AsyncClient) -> None:
    rng = random.Random(1)
    answers = []
    for tokens in (60, 400, 1000, 1490):
        question = recall.make_question(rng, tokens)
        generated = await client.generate(chat_prompt(question.messages), temperature=0, max_tokens=8)
        route = generated.completion.route
        assert (route.prefill_worker_id, route.decode_worker_id) == ("prefill-0", "decode-0")
        assert route.handoff == generation.HANDOFF_OUTCOME_PULLED
        assert route.kv_bytes > 0
        answers.append(generated.text.strip() == question.answer)
    assert sum(answers) >= 3, answers


async def test_tokens_text_and_finish_equal_one_plain_vllm(client: AsyncClient, loaded: LoadedConfig) -> None:
    tokenizer = Tokenizer(loaded.config.model.resolved_path)
    await tokenizer.load()
    async with plain_engine(loaded.config) as (address, model):
        cases = identity.make_cases(PROMPTS, 7, model.vocabulary_size, model.max_model_len, tokenizer.encode)
        plain = DirectWorker(address, GENERATION)
        report = await identity.compare(cases, client, plain, 4, lambda: None, exact=True)
        # The negative control: a comparison that could not tell one seed from another would prove nothing.
        seeded = next(case for case in cases if case.sampling.get("seed") and case.sampling["max_tokens"] > 8)
        other = identity.Case(0, seeded.token_ids, {**seeded.sampling, "seed": seeded.sampling["seed"] + 1})
        crossed = identity.difference(
            seeded,
            await client.generate(token_prompt(other.token_ids), **other.sampling),
            await plain.decode(list(seeded.token_ids), seeded.sampling),
        )
        structured = await compared(range(GRAMMARS), client, plain)
        await plain.close()
    assert structured.problems == []
    assert structured.identical == GRAMMARS
    assert structured.valid == structured.whole > GRAMMARS // 5
    assert structured.pulled > GRAMMARS // 2
    assert report.divergences == []
    assert report.identical == PROMPTS
    assert report.pulled > PROMPTS * 0.8
    assert crossed is not None
    await until(lambda: all_blocks_free(client), "all blocks free")


async def test_bytes_of_requests_add_up_to_what_nixl_counted(client: AsyncClient) -> None:
    before = await _decode_counters(client)
    rng = random.Random(3)
    reported = descriptors = 0
    for tokens in (1, 33, 700):
        prompt = token_prompt([rng.randrange(256) for _ in range(tokens)])
        generated = await client.generate(prompt, temperature=0, max_tokens=4, ignore_eos=True)
        reported += generated.completion.route.kv_bytes
        descriptors += generated.completion.route.kv_descriptors
    after = await _decode_counters(client)
    assert after.kv_bytes_pulled - before.kv_bytes_pulled == reported > 0
    assert after.kv_descriptors_pulled - before.kv_descriptors_pulled == descriptors > 0
    assert after.handoffs_pulled - before.handoffs_pulled == 3


async def test_first_token_is_sent_before_the_hand_off(client: AsyncClient) -> None:
    prompt = token_prompt([(7 * index) % 250 for index in range(1200)])
    pieces = [piece async for piece in client.stream(prompt, temperature=0, max_tokens=4, ignore_eos=True)]
    timings = pieces[-1].timings  # type: ignore[union-attr]
    assert len(pieces[0].token_ids) == 1  # type: ignore[union-attr]
    assert timings.transfer_ms > 0
    assert timings.ttft_ms == pytest.approx(timings.queue_ms + timings.prefill_ms, abs=1.0)


async def test_a_repeated_prompt_reports_cached_tokens(client: AsyncClient) -> None:
    prompt = token_prompt([(3 * index + 1) % 250 for index in range(320)])
    first = await client.generate(prompt, temperature=0, max_tokens=2, ignore_eos=True)
    second = await client.generate(prompt, temperature=0, max_tokens=2, ignore_eos=True)
    assert first.completion.usage.cached_tokens == 0
    assert second.completion.usage.cached_tokens == 288
    assert second.token_ids == first.token_ids


async def test_prompts_with_different_salts_share_nothing_in_either_pool(client: AsyncClient) -> None:
    prompt = token_prompt([(7 * index + 2) % 250 for index in range(320)])
    greedy: dict[str, Any] = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
    cached, kv_bytes, answers = [], [], []
    for salt in ("tenant-a", "tenant-b", "tenant-a", ""):
        generated = await client.generate(prompt, cache_salt=salt, **greedy)
        cached.append(generated.completion.usage.cached_tokens)
        kv_bytes.append(generated.completion.route.kv_bytes)
        answers.append(generated.token_ids)
    async with client.session([*prompt.token_ids.ids[:200]], cache_salt="tenant-c", **greedy) as session:
        await session.append([*prompt.token_ids.ids[200:]])
        answers.append([token async for delta in session.finish() for token in delta.token_ids])
        cached.append(session.completion.usage.cached_tokens)
    generated = await client.generate(prompt, cache_salt="tenant-c", **greedy)
    cached.append(generated.completion.usage.cached_tokens)
    answers.append(generated.token_ids)
    assert cached == [0, 0, 288, 0, 0, 288]
    assert kv_bytes[0] == kv_bytes[1] == kv_bytes[3] > kv_bytes[2]
    assert all(answer == answers[0] for answer in answers)


async def test_text_split_over_tokens_arrives_whole(client: AsyncClient) -> None:
    """The byte-level vocabulary gives parts of characters: what is streamed must equal what is sent at once."""
    prompt = text_prompt("größe; ünïcödé; 漢字; größe; ünïcödé; 漢字; gr")
    pieces = [piece async for piece in client.stream(prompt, temperature=0, max_tokens=24, ignore_eos=True)]
    streamed = "".join(piece.text for piece in pieces if isinstance(piece, generation.CompletionDelta))
    whole = await client.generate(prompt, temperature=0, max_tokens=24, ignore_eos=True)
    assert streamed == whole.text


BAD_REQUESTS: list[tuple[str, dict[str, Any], str]] = [
    ("prompt", {}, "INVALID_ARGUMENT"),
    ("prompt.text", {"prompt": text_prompt("")}, "INVALID_ARGUMENT"),
    ("prompt.token_ids", {"prompt": token_prompt([1, 400_000])}, "OUT_OF_RANGE"),
    ("prompt.token_ids", {"prompt": token_prompt([1] * 5000)}, "OUT_OF_RANGE"),
    ("prompt.text", {"prompt": text_prompt("x" * (1 << 20))}, "OUT_OF_RANGE"),
    ("sampling.max_tokens", {"prompt": token_prompt([1]), "sampling": {"max_tokens": 4096}}, "OUT_OF_RANGE"),
    (
        "sampling.temperature",
        {"prompt": token_prompt([1]), "sampling": {"temperature": float("nan")}},
        "INVALID_ARGUMENT",
    ),
    ("sampling.top_p", {"prompt": token_prompt([1]), "sampling": {"top_p": 1.5}}, "INVALID_ARGUMENT"),
    ("sampling.logprobs", {"prompt": token_prompt([1]), "sampling": {"logprobs": 21}}, "INVALID_ARGUMENT"),
    ("model", {"prompt": token_prompt([1]), "model": "other"}, "INVALID_ARGUMENT"),
    ("prompt.chat.messages[0].role", {"prompt": chat_prompt([{"role": "x", "content": "y"}])}, "INVALID_ARGUMENT"),
    ("request", {"prompt": text_prompt("x" * ((4 << 20) + 1000))}, "OUT_OF_RANGE"),
]


@pytest.mark.parametrize(("field", "fields", "status"), BAD_REQUESTS)
async def test_bad_input_names_its_field_and_the_engine_goes_on(
    client: AsyncClient, field: str, fields: dict[str, Any], status: str
) -> None:
    fields = dict(fields)
    if "sampling" in fields:
        fields["sampling"] = generation.SamplingParams(**fields["sampling"])
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        async for _ in client.call(api.GenerateRequest(**fields)):
            pass
    assert refused.value.code().name == status
    too_large = "prompt" in fields and len(fields["prompt"].text) > 1 << 20
    assert (refused.value.details() or "").startswith("request:" if too_large else f"{field}:")
    answered = await client.generate(token_prompt([5, 6, 7]), temperature=0, max_tokens=2, ignore_eos=True)
    assert len(answered.token_ids) == 2


async def test_invalid_utf8_names_the_field(target: Target) -> None:
    text = b"\xff\xfe"
    prompt = bytes([0x0A, len(text)]) + text
    async with secured.channel(target.address) as channel:
        call = channel.unary_stream("/rachis.v1.RouterService/Generate", bytes, api.GenerateResponse.FromString)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in call(bytes([0x12, len(prompt)]) + prompt):
                pass
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.details() == "prompt.text: is not valid UTF-8"


@pytest.mark.parametrize("after_pieces", [0, 1, 3])
async def test_a_cancelled_request_frees_its_blocks_on_both_pools(client: AsyncClient, after_pieces: int) -> None:
    prompt = token_prompt([(11 * index + after_pieces) % 250 for index in range(1800)])
    request = api.GenerateRequest(
        prompt=prompt, sampling=generation.SamplingParams(max_tokens=2000, temperature=0, ignore_eos=True)
    )
    call = client.call(request)
    for _ in range(after_pieces):
        await call.read()
    if after_pieces == 0:
        await until(lambda: _somewhere_running(client), "the request runs")
    call.cancel()
    # A lease that the decode worker was told of is kept until its deadline when no more was heard of it.
    await until(lambda: all_blocks_free(client), "all blocks free")
    outcomes = (await client.router_status()).outcomes
    assert outcomes["cancelled"] >= 1


async def test_a_deadline_ends_the_request_and_frees_its_blocks(client: AsyncClient) -> None:
    prompt = token_prompt([(13 * index) % 250 for index in range(500)])
    with pytest.raises(grpc.aio.AioRpcError) as expired:
        await client.generate(prompt, timeout_s=1.0, max_tokens=3500, temperature=0, ignore_eos=True)
    assert expired.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: all_blocks_free(client), "all blocks free")


async def test_many_at_once_all_finish_and_nothing_is_held(client: AsyncClient) -> None:
    rng = random.Random(5)
    prompts = [[rng.randrange(250) for _ in range(rng.randint(1, 300))] for _ in range(24)]
    alone = await client.generate(token_prompt(prompts[0]), temperature=0, max_tokens=12, ignore_eos=True)
    together = await asyncio.gather(
        *(client.generate(token_prompt(tokens), temperature=0, max_tokens=12, ignore_eos=True) for tokens in prompts)
    )
    assert all(len(generated.token_ids) == 12 for generated in together)
    assert together[0].token_ids == alone.token_ids
    await until(lambda: all_blocks_free(client), "all blocks free")


async def test_health_and_reflection_answer_as_their_standards_say(target: Target) -> None:
    async with secured.channel(target.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", "rachis.v1.RouterService"):
            checked = await health.Check(health_pb2.HealthCheckRequest(service=service))
            assert checked.status == health_pb2.HealthCheckResponse.SERVING
        watched = await health.Watch(health_pb2.HealthCheckRequest(service="")).read()
        assert watched.status == health_pb2.HealthCheckResponse.SERVING
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = reflection_pb2.ServerReflectionRequest(file_containing_symbol="rachis.v1.RouterService")
        answers = stub.ServerReflectionInfo(iter([asked]))
        answer = await answers.read()
    files = [
        descriptor_pb2.FileDescriptorProto.FromString(raw)
        for raw in answer.file_descriptor_response.file_descriptor_proto
    ]
    assert "rachis/v1/router.proto" in [file.name for file in files]


async def test_a_drained_worker_gets_nothing_new_until_it_is_resumed(client: AsyncClient) -> None:
    await client.admin.DrainWorker(admin.DrainWorkerRequest(worker_id="prefill-0"))
    await until(lambda: _state_is(client, "prefill-0", wire.WORKER_STATE_DRAINING), "prefill-0 drains")
    alone = await client.generate(token_prompt([1, 2, 3]), temperature=0, max_tokens=3, ignore_eos=True)
    assert alone.completion.route.prefill_worker_id == ""
    assert alone.completion.route.handoff == generation.HANDOFF_OUTCOME_NONE
    await client.admin.ResumeWorker(admin.ResumeWorkerRequest(worker_id="prefill-0"))
    await until(lambda: _state_is(client, "prefill-0", wire.WORKER_STATE_READY), "prefill-0 is back")

    async def handed_off() -> bool:
        again = await client.generate(token_prompt([1, 2, 3]), temperature=0, max_tokens=3, ignore_eos=True)
        assert again.token_ids == alone.token_ids
        return again.completion.route.prefill_worker_id == "prefill-0"

    await until(handed_off, "prefill-0 is used again")


async def test_effective_config_names_the_source_of_each_value(client: AsyncClient) -> None:
    config = await client.admin.GetEffectiveConfig(admin.GetEffectiveConfigRequest())
    entries = {entry.key: (entry.value, entry.source) for entry in config.entries}
    assert entries["engine.dtype"] == ('"float32"', "default")
    assert entries["router.port"][1] == "file"


async def _decode_counters(client: AsyncClient) -> wire.WorkerCounters:
    """Counters of the decode worker once it is idle: telemetry of a pull is read with the step after it."""
    await until(lambda: all_blocks_free(client), "all blocks free")
    return next(view.counters for view in await client.workers() if view.registration.pool == wire.POOL_DECODE)


async def _somewhere_running(client: AsyncClient) -> bool:
    return any(view.load.running_requests for view in await client.workers())


async def _state_is(client: AsyncClient, worker_id: str, state: wire.WorkerState.ValueType) -> bool:
    return any(
        view.registration.state == state for view in await client.workers() if view.registration.worker_id == worker_id
    )
