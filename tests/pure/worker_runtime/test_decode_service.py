"""The decode pool's service over a fake engine: its stream of messages, and the job that a request becomes."""

import json
from typing import Any

import pytest
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire

from cluster_core.clock import UnixMs
from cluster_core.engine_jobs import EmittedTokens, KvLease, SamplingSpec
from cluster_core.engine_reports import EngineLoad
from decode_worker.service import DecodeService, decode_job
from tests.fakes.cluster import until
from tests.fakes.engine import FakeEngine, expected_text, fabric
from tests.pure.worker_runtime.worker_calls import (
    PROMPT,
    RecordingContext,
    context,
    prefill,
    prefill_request,
    registration,
)
from worker_runtime.wire_conversion import to_wire


async def decode(engine: FakeEngine, request: wire.DecodeRequest) -> list[wire.DecodeResponse]:
    service = DecodeService(engine, registration(), lambda: None)
    return [message async for message in service.Decode(request, context())]


def shown(messages: list[wire.DecodeResponse]) -> str:
    return "".join(message.delta.text + message.end.delta.text for message in messages)


def decode_request(emitted: wire.EmittedTokens | None = None, **sampling: Any) -> wire.DecodeRequest:
    return wire.DecodeRequest(
        request_id="r#2",
        generation=3,
        token_ids=PROMPT,
        sampling=generation.SamplingParams(**{"max_tokens": 6, "temperature": 0.0, **sampling}),
        emitted=emitted,
    )


async def test_decode_starts_once_then_streams_then_ends_once() -> None:
    messages = await decode(FakeEngine(), decode_request())

    kinds = [message.WhichOneof("event") for message in messages]
    assert kinds == ["started", *["delta"] * 5, "end"]
    assert shown(messages) == expected_text(PROMPT, SamplingSpec(max_tokens=6))
    assert messages[0].started.handoff == generation.HANDOFF_OUTCOME_NONE
    end = messages[-1].end
    assert (end.finish_reason, end.completion_tokens) == (generation.FINISH_REASON_LENGTH, 6)
    assert len(end.delta.token_ids) == 1, "the last piece and the end are one message"


@pytest.mark.parametrize("emitted", [1, 4])
async def test_decode_counts_tokens_that_it_did_not_sample(emitted: int) -> None:
    text = expected_text(PROMPT, SamplingSpec(max_tokens=6))
    so_far = wire.EmittedTokens(token_ids=map(ord, text[:emitted]), sent_chars=emitted)

    messages = await decode(FakeEngine(), decode_request(so_far))

    assert shown(messages) == text[emitted:]
    assert messages[-1].end.completion_tokens == 6


async def test_a_decode_that_is_closed_early_frees_its_blocks() -> None:
    engine = FakeEngine()
    stream = DecodeService(engine, registration(), lambda: None).Decode(decode_request(max_tokens=500), context())
    await anext(stream)
    assert engine.status().load.running_requests == 1

    await stream.aclose()  # type: ignore[attr-defined]

    await until(lambda: engine.status().load == EngineLoad(0, 0, 0, 1024, 1024))


def test_a_decode_job_without_hand_off_has_neither_pull_nor_emitted_tokens() -> None:
    job = decode_job(decode_request())

    assert (job.pull, job.emitted, job.hand_off) == (None, None, False)


@pytest.mark.parametrize("left_s", [None, 0.0, 2.5])
async def test_a_decode_job_knows_its_priority_and_how_long_the_call_still_waits(left_s: float | None) -> None:
    engine, request = FakeEngine(), decode_request(max_tokens=1)
    request.priority = -7
    service: Any = DecodeService(engine, registration(), lambda: None)

    called = RecordingContext()
    called.left_s = left_s

    async for _ in service.Decode(request, called):
        pass

    assert [(job.priority, job.deadline_s) for job in engine.jobs] == [(-7, left_s)]


def test_a_decode_job_takes_over_lease_and_emitted_tokens() -> None:
    lease = KvLease("r#1", b'{"a":1}', UnixMs(1_700_000_000_123))
    request = decode_request(wire.EmittedTokens(token_ids=[0, 7], sent_chars=1))
    request.handoff.CopyFrom(to_wire(lease, wire.KvHandoff, worker_id="prefill-0", generation=9))

    job = decode_job(request)

    assert job.pull == lease
    assert job.emitted == EmittedTokens((0, 7), 1)


async def test_the_lease_of_a_prefill_is_pulled_by_a_decode_of_the_same_fabric() -> None:
    shared = fabric()
    prefiller, decoder = FakeEngine("p", shared), FakeEngine("d", shared)
    prefilled = await prefill(prefiller, prefill_request(temperature=0.0))
    request = decode_request(
        wire.EmittedTokens(token_ids=prefilled.first.token_ids, sent_chars=len(prefilled.first.text))
    )
    request.handoff.CopyFrom(prefilled.handoff)

    messages = await decode(decoder, request)

    assert json.loads(prefilled.handoff.connector_params)["engine"] == "p"
    assert messages[0].started.handoff == generation.HANDOFF_OUTCOME_PULLED
    assert messages[0].started.pulled_tokens == len(PROMPT)
    assert prefiller.status().load.free_blocks == prefiller.status().load.total_blocks
