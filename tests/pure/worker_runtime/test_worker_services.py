"""The two pools' services over a fake engine, and the conversions between wire and engine, without a server."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from itertools import count
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire

from cluster_core.clock import UnixMs
from cluster_core.engine_jobs import (
    EngineJob,
    EngineOutput,
    FirstToken,
    KvLease,
    PositionLogprobs,
    SamplingSpec,
    TokenLogprob,
)
from cluster_core.engine_reports import (
    DecodeBatch,
    DecodeReport,
    EngineCounters,
    EngineLoad,
    HotPrefix,
    PolicyRow,
    PrefixGroup,
    TierReport,
    WaitingRequest,
)
from decode_worker.service import DecodeService, decode_job
from prefill_worker.service import PrefillService, first_token_sampling, prefill_job, presentable_text
from tests import simulated_time
from tests.fakes.engine import FakeEngine, expected_text
from worker_runtime.wire_conversion import from_wire, to_wire

PROMPT = (10, 11, 12, 13)
SET_SAMPLING: dict[str, Any] = {
    "max_tokens": 7,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.125,
    "seed": 11,
    "presence_penalty": -0.5,
    "frequency_penalty": 0.25,
    "repetition_penalty": 1.5,
    "logprobs": 0,
    "min_tokens": 2,
    "ignore_eos": True,
    "stop": ["a", "bc"],
    "stop_token_ids": [3, 4],
}


class Aborted(Exception):
    pass


class RecordingContext:
    """The part of a ServicerContext that the services use."""

    code: str = ""
    details: str = ""
    left_s: float | None = None

    def time_remaining(self) -> float | None:
        return self.left_s

    async def abort(self, code: grpc.StatusCode, details: str, _metadata: tuple[tuple[str, str | bytes], ...]) -> None:
        self.code, self.details = code.name, details
        raise Aborted


def context() -> Any:
    """A context for calls that are not refused."""
    return RecordingContext()


def registration(**values: Any) -> wire.WorkerRegistration:
    return wire.WorkerRegistration(**{"worker_id": "w-0", "generation": 3, "state": wire.WORKER_STATE_READY, **values})


def prefill_request(hand_off: bool = True, **sampling: Any) -> wire.PrefillRequest:
    return wire.PrefillRequest(
        request_id="r#1",
        generation=3,
        token_ids=PROMPT,
        sampling=generation.SamplingParams(**{"max_tokens": 6, **sampling}),
        hand_off=hand_off,
    )


def test_sampling_from_wire_takes_over_every_field_that_is_set() -> None:
    spec = from_wire(generation.SamplingParams(**SET_SAMPLING), SamplingSpec)

    expected: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in SET_SAMPLING.items()
    }
    assert {field.name for field in fields(SamplingSpec)} == set(expected)
    assert spec == SamplingSpec(**expected)


def test_sampling_from_wire_leaves_the_protocols_defaults_for_the_rest() -> None:
    assert from_wire(generation.SamplingParams(), SamplingSpec) == SamplingSpec()


def test_every_field_of_the_sampling_message_reaches_the_engine() -> None:
    assert {field.name for field in generation.SamplingParams.DESCRIPTOR.fields} == set(SET_SAMPLING)


@pytest.mark.parametrize("name", sorted(set(SET_SAMPLING) - {"stop", "stop_token_ids"}))
def test_a_field_set_to_zero_is_not_taken_for_absent(name: str) -> None:
    zero: dict[str, Any] = {name: 0}

    spec = from_wire(generation.SamplingParams(**zero), SamplingSpec)

    assert getattr(spec, name) == 0
    assert getattr(spec, name) is not None


@pytest.mark.parametrize(("asked", "first"), [(0, 0), (1, 1), (9, 1)])
def test_the_first_token_is_sampled_as_asked_but_alone(asked: int, first: int) -> None:
    spec = SamplingSpec(max_tokens=50, min_tokens=asked, temperature=0.3, seed=9, stop=("x",), logprobs=4)

    alone = first_token_sampling(spec)

    assert (alone.max_tokens, alone.min_tokens) == (1, first)
    assert (alone.temperature, alone.seed, alone.stop, alone.logprobs) == (0.3, 9, ("x",), 4)


def test_a_prefill_job_carries_prompt_name_and_hand_off() -> None:
    job = prefill_job(prefill_request(temperature=0.0))

    assert (job.request_id, job.token_ids, job.hand_off, job.pull, job.first) == ("r#1", PROMPT, True, None, None)
    assert job.sampling.max_tokens == 1


@pytest.mark.parametrize(
    ("text", "has_stop_strings", "shown"),
    [
        ("word", False, "word"),
        ("", False, ""),
        ("word", True, ""),
        ("\N{REPLACEMENT CHARACTER}", False, ""),
        ("wo\N{REPLACEMENT CHARACTER}", False, ""),
        ("\N{REPLACEMENT CHARACTER}d", False, "\N{REPLACEMENT CHARACTER}d"),
    ],
)
def test_text_that_a_later_token_can_change_is_held_back(text: str, has_stop_strings: bool, shown: str) -> None:
    assert presentable_text(text, has_stop_strings=has_stop_strings) == shown


def lease_of(response: wire.PrefillResponse) -> str:
    return response.handoff.lease_id


async def prefill(engine: FakeEngine, request: wire.PrefillRequest, **record: Any) -> wire.PrefillResponse:
    return await PrefillService(engine, registration(**record), lambda: None).Prefill(request, context())


async def test_prefill_answers_with_the_first_token_and_its_lease() -> None:
    engine = FakeEngine()

    response = await prefill(engine, prefill_request(temperature=0.0))

    text = expected_text(PROMPT, SamplingSpec(max_tokens=6))
    assert (response.first.text, list(response.first.token_ids)) == (text[0], [ord(text[0])])
    assert response.finish_reason == generation.FINISH_REASON_UNSPECIFIED
    assert (response.handoff.prefill_worker_id, response.handoff.prefill_generation) == ("w-0", 3)
    assert lease_of(response) == "r#1"
    assert engine.status().load.leased_handoffs == 1


async def test_prefill_holds_the_text_back_while_a_stop_string_may_begin() -> None:
    response = await prefill(FakeEngine(), prefill_request(stop=["zzzz"]))

    assert (response.first.text, len(response.first.token_ids)) == ("", 1)
    assert lease_of(response)


async def test_prefill_that_ends_the_request_shows_all_text_and_leases_nothing() -> None:
    engine = FakeEngine()

    response = await prefill(engine, prefill_request(hand_off=False, max_tokens=1, stop=["zzzz"]))

    assert len(response.first.text) == 1
    assert response.finish_reason == generation.FINISH_REASON_LENGTH
    assert not response.HasField("handoff")
    assert engine.status().load.free_blocks == engine.status().load.total_blocks


async def test_prefill_that_stops_at_once_says_so_and_leases_nothing() -> None:
    first = expected_text(PROMPT, SamplingSpec(max_tokens=1))

    response = await prefill(FakeEngine(), prefill_request(temperature=0.0, stop=[first]))

    assert (response.first.text, response.finish_reason) == ("", generation.FINISH_REASON_STOP)
    assert not response.HasField("handoff")


async def refusal(service: PrefillService, call: str, request: Message) -> tuple[str, str]:
    recording = RecordingContext()
    with pytest.raises(Aborted):
        await getattr(service, call)(request, recording)
    return recording.code, recording.details


async def test_a_call_for_another_generation_is_refused_before_the_engine_hears_of_it() -> None:
    engine = FakeEngine()
    service = PrefillService(engine, registration(generation=4), lambda: None)

    assert await refusal(service, "Prefill", prefill_request()) == (
        "FAILED_PRECONDITION",
        "the call is for generation 3 of w-0, this is 4",
    )
    stale_release = wire.ReleaseHandoffRequest(lease_id="r#1", generation=3)
    assert (await refusal(service, "ReleaseHandoff", stale_release))[0] == "FAILED_PRECONDITION"
    assert engine.jobs == []


async def test_a_draining_worker_refuses_new_prefills_but_still_releases() -> None:
    service = PrefillService(FakeEngine(), registration(state=wire.WORKER_STATE_DRAINING), lambda: None)

    assert await refusal(service, "Prefill", prefill_request()) == ("ABORTED", "worker w-0 is draining")
    answer = await service.ReleaseHandoff(wire.ReleaseHandoffRequest(lease_id="x", generation=3), context())
    assert answer.released is False


async def test_draining_and_resuming_change_the_registration_and_tell_the_registry() -> None:
    told: list[wire.WorkerState.ValueType] = []
    record = registration()
    service = PrefillService(FakeEngine(), record, lambda: told.append(record.state))

    drained = await service.SetDraining(wire.SetDrainingRequest(draining=True), context())
    resumed = await service.SetDraining(wire.SetDrainingRequest(draining=False), context())

    assert [drained.state, resumed.state] == told == [wire.WORKER_STATE_DRAINING, wire.WORKER_STATE_READY]


async def test_a_dead_engine_answers_unavailable() -> None:
    engine = FakeEngine()
    engine.die("out of luck")
    service = PrefillService(engine, registration(), lambda: None)

    assert await refusal(service, "Prefill", prefill_request()) == ("UNAVAILABLE", "the engine died: out of luck")


async def test_status_tells_load_and_counters() -> None:
    engine = FakeEngine()
    service = PrefillService(engine, registration(), lambda: None)
    await service.Prefill(prefill_request(), context())

    status = await service.GetWorkerStatus(wire.GetWorkerStatusRequest(), context())

    assert (status.load.leased_handoffs, status.counters.handoffs_leased, status.counters.requests) == (1, 1, 1)
    assert status.counters.prompt_tokens == len(PROMPT)
    assert status.counters.resident_bytes > 0
    assert status.counters.node_memory_bytes > status.counters.node_available_bytes > 0
    assert status.registration.worker_id == "w-0"


async def status_of(
    engine: FakeEngine, hottest_prefixes: int = 0, batch_entries: int = 0
) -> wire.GetWorkerStatusResponse:
    service = PrefillService(engine, registration(), lambda: None)
    request = wire.GetWorkerStatusRequest(hottest_prefixes=hottest_prefixes, batch_entries=batch_entries)
    return await service.GetWorkerStatus(request, context())


async def test_status_tells_what_the_tiers_saved_and_the_hottest_prefixes_only_when_asked() -> None:
    engine = FakeEngine()
    for name in ("r#1", "r#2"):
        async for _ in engine.generate(EngineJob(name, tuple(range(9)), SamplingSpec(max_tokens=1))):
            pass

    status = await status_of(engine)
    asked = await status_of(engine, 5)

    assert (status.tiers.prompt_tokens, status.tiers.device_hit_tokens, status.tiers.device_blocks) == (18, 8, 2)
    assert not status.HasField("hottest")
    assert asked.tiers == status.tiers
    [prefix] = asked.hottest.prefixes
    assert (prefix.tokens, prefix.device_blocks, prefix.host_blocks, prefix.frequency) == (8, 2, 0, 2)


async def test_a_worker_without_tiers_tells_nothing_of_them() -> None:
    status = await status_of(FakeEngine(has_tiers=False), 5)

    assert (status.HasField("tiers"), status.HasField("hottest")) == (False, False)


async def test_more_of_the_hottest_prefixes_than_the_limit_are_not_told() -> None:
    engine = FakeEngine()
    for number in range(120):
        async for _ in engine.generate(EngineJob(f"r#{number}", (number,) * 5, SamplingSpec(max_tokens=1))):
            pass

    assert len((await status_of(engine, 7)).hottest.prefixes) == 7
    assert len((await status_of(engine, 2**32 - 1)).hottest.prefixes) == 100


def test_an_engine_in_a_long_step_is_not_waited_for() -> None:
    class Busy(FakeEngine):
        async def hottest_prefixes(self, at_most: int) -> Sequence[HotPrefix]:
            return await asyncio.Future()

        async def decode_batch(self, at_most: int) -> DecodeBatch:
            return await asyncio.Future()

    status = simulated_time.run(status_of(Busy(forms_batches=True), 5, 5))

    assert (status.HasField("tiers"), status.HasField("hottest")) == (True, False)
    assert (status.HasField("decode"), status.HasField("batch")) == (True, False)


async def test_status_tells_how_the_batch_is_formed_and_the_batch_only_when_asked() -> None:
    engine = FakeEngine(forms_batches=True)
    engine.hold_before(1)
    running = [engine.generate(EngineJob(f"r#{number}", (*range(8), number), SamplingSpec())) for number in range(3)]
    for outputs in running:
        await anext(outputs)

    status = await status_of(engine)
    asked = await status_of(engine, batch_entries=1)

    assert (status.decode.running_requests, status.decode.tip_tokens) == (3, 8)
    assert dict(status.decode.admissions) == {"idle": 1, "policy": 2}
    assert not status.HasField("batch")
    assert asked.decode == status.decode
    assert [(group.tokens, group.running) for group in asked.batch.groups] == [(8, 3)]
    for outputs in running:
        await outputs.aclose()  # type: ignore[attr-defined]


async def test_a_worker_without_a_decode_report_tells_nothing_of_a_batch() -> None:
    status = await status_of(FakeEngine(), batch_entries=5)

    assert (status.HasField("decode"), status.HasField("batch")) == (False, False)


async def test_more_of_a_batch_than_the_limit_is_not_told() -> None:
    class Many(FakeEngine):
        async def decode_batch(self, at_most: int) -> DecodeBatch:
            return DecodeBatch(groups=(PrefixGroup("", 0, 1, 0),) * at_most)

    engine = Many(forms_batches=True)

    assert len((await status_of(engine, batch_entries=7)).batch.groups) == 7
    assert len((await status_of(engine, batch_entries=2**32 - 1)).batch.groups) == 100


async def decode(engine: FakeEngine, request: wire.DecodeRequest) -> list[wire.DecodeResponse]:
    service = DecodeService(engine, registration(), lambda: None)
    return [message async for message in service.Decode(request, context())]


def decode_request(first: wire.SampledFirstToken | None = None, **sampling: Any) -> wire.DecodeRequest:
    return wire.DecodeRequest(
        request_id="r#2",
        generation=3,
        token_ids=PROMPT,
        sampling=generation.SamplingParams(**{"max_tokens": 6, "temperature": 0.0, **sampling}),
        first=first,
    )


async def test_decode_starts_once_then_streams_then_ends_once() -> None:
    messages = await decode(FakeEngine(), decode_request())

    kinds = [message.WhichOneof("event") for message in messages]
    assert kinds == ["started", *["delta"] * 6, "end"]
    assert "".join(message.delta.text for message in messages) == expected_text(PROMPT, SamplingSpec(max_tokens=6))
    assert messages[0].started.handoff == generation.HANDOFF_OUTCOME_NONE
    assert messages[-1].end == wire.DecodeEnd(finish_reason=generation.FINISH_REASON_LENGTH, completion_tokens=6)


async def test_decode_counts_a_first_token_that_it_did_not_sample() -> None:
    text = expected_text(PROMPT, SamplingSpec(max_tokens=6))
    first = wire.SampledFirstToken(token_id=ord(text[0]), sent_text=text[0])

    messages = await decode(FakeEngine(), decode_request(first))

    assert "".join(message.delta.text for message in messages) == text[1:]
    assert messages[-1].end.completion_tokens == 6


async def test_a_decode_that_is_closed_early_frees_its_blocks() -> None:
    engine = FakeEngine()
    stream = DecodeService(engine, registration(), lambda: None).Decode(decode_request(max_tokens=500), context())
    await anext(stream)
    assert engine.status().load.running_requests == 1

    await stream.aclose()  # type: ignore[attr-defined]

    assert engine.status().load == EngineLoad(0, 0, 0, 1024, 1024)


def test_a_decode_job_without_hand_off_has_neither_pull_nor_first_token() -> None:
    job = decode_job(decode_request())

    assert (job.pull, job.first, job.hand_off) == (None, None, False)


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


def test_a_decode_job_takes_over_lease_and_first_token() -> None:
    lease = KvLease("r#1", b'{"a":1}', UnixMs(1_700_000_000_123))
    request = decode_request(wire.SampledFirstToken(token_id=0, sent_text=""))
    request.handoff.CopyFrom(to_wire(lease, wire.KvHandoff, prefill_worker_id="prefill-0", prefill_generation=9))

    job = decode_job(request)

    assert job.pull == lease
    assert job.first == FirstToken(0, "")


def test_logprobs_keep_their_order_on_the_wire() -> None:
    row = PositionLogprobs(TokenLogprob(7, -3.0, 9), (TokenLogprob(1, -0.5, 1), TokenLogprob(2, -1.0, 2)))

    delta = to_wire(EngineOutput((7,), "x", (row,)), generation.CompletionDelta)

    [position] = delta.logprobs
    assert (position.sampled.token_id, position.sampled.logprob, position.sampled.rank) == (7, -3.0, 9)
    assert [(entry.token_id, entry.rank) for entry in position.top] == [(1, 1), (2, 2)]


@given(st.builds(EngineCounters, **{field.name: st.integers(0, 2**40) for field in fields(EngineCounters)}))
def test_every_counter_of_the_engine_is_told_under_its_own_name(counters: EngineCounters) -> None:
    message = to_wire(counters, wire.WorkerCounters)

    # The other two are told to the index, with each renewal of the registration.
    names = {field.name for field in fields(counters)} - {"cacheable_requests", "stored_blocks"}
    assert {name: getattr(message, name) for name in names} == {name: getattr(counters, name) for name in names}


def test_a_report_of_tiers_keeps_every_field_under_its_own_name() -> None:
    numbers = dict(zip((field.name for field in fields(TierReport)), count(1)))
    report = TierReport(**{**numbers, "refused_offers": {"frequency": 7}})  # type: ignore[arg-type]

    message = to_wire(report, wire.TierReport)

    told = {field.name: getattr(message, field.name) for field in wire.TierReport.DESCRIPTOR.fields}
    assert told == {**numbers, "refused_offers": {"frequency": 7}}


DECODE_REPORT = DecodeReport(
    "bandit", "probe", 1, 2, 3, 4, {"held": 5}, 6, 7, 8, {"overdue": 9}, 10, {"held": 1.5}, 2.5, 11, 3.5, 12, 13
)
DECODE_BATCH = DecodeBatch(
    groups=(PrefixGroup("0a", 64, 1, 2),),
    waiting=(WaitingRequest("r#1", 80, 0.5, "held", 64, -3),),
    table=(PolicyRow("1-4", "0", "1+", 5, 6, 0.25, None),),
    longest_wait_s={"held": 0.75},
)


def test_a_decode_report_keeps_every_field_under_its_own_name() -> None:
    message = to_wire(DECODE_REPORT, wire.DecodeReport)

    assert {field.name: getattr(message, field.name) for field in wire.DecodeReport.DESCRIPTOR.fields} == asdict(
        DECODE_REPORT
    )


def test_a_decode_batch_keeps_every_field_under_its_own_name_and_what_is_unknown_absent() -> None:
    message = to_wire(DECODE_BATCH, wire.DecodeBatch)

    for name, kind in (("groups", wire.PrefixGroup), ("waiting", wire.WaitingRequest), ("table", wire.PolicyRow)):
        [told], [given] = getattr(message, name), getattr(DECODE_BATCH, name)
        there = {field.name for field in kind.DESCRIPTOR.fields if not field.has_presence or told.HasField(field.name)}
        assert {name: getattr(told, name) for name in there} == {
            name: value for name, value in asdict(given).items() if value is not None
        }
    assert dict(message.longest_wait_s) == {"held": 0.75}


async def test_the_lease_of_a_prefill_is_pulled_by_a_decode_of_the_same_fabric() -> None:
    fabric: dict[str, FakeEngine] = {}
    prefiller, decoder = FakeEngine("p", fabric), FakeEngine("d", fabric)
    prefilled = await prefill(prefiller, prefill_request(temperature=0.0))
    request = decode_request(
        wire.SampledFirstToken(token_id=prefilled.first.token_ids[0], sent_text=prefilled.first.text)
    )
    request.handoff.CopyFrom(prefilled.handoff)

    messages = await decode(decoder, request)

    assert json.loads(prefilled.handoff.connector_params)["engine"] == "p"
    assert messages[0].started.handoff == generation.HANDOFF_OUTCOME_PULLED
    assert messages[0].started.pulled_tokens == len(PROMPT)
    assert prefiller.status().load.free_blocks == prefiller.status().load.total_blocks


async def test_a_call_that_the_engine_has_not_heard_of_yet_keeps_its_worker_busy() -> None:
    record = registration()
    service = PrefillService(FakeEngine(), record, lambda: None)
    assert service.is_idle()
    with service._taken(record.generation):
        assert not service.is_idle()
        status = await service.GetWorkerStatus(wire.GetWorkerStatusRequest(), context())
        assert status.load.active_calls == 1
    assert service.is_idle()
