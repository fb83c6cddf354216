"""The prefill pool's service over a fake engine: first token, lease, refusals, and text that is held back."""

import pytest
from google.protobuf.message import Message
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire

from cluster_core.engine_jobs import SamplingSpec
from decode_worker.service import decode_job
from prefill_worker.service import PrefillService, next_token_sampling, prefill_job, presentable_text
from tests.fakes.engine import FakeEngine, expected_text
from tests.pure.worker_runtime.worker_calls import (
    PROMPT,
    Aborted,
    RecordingContext,
    context,
    prefill,
    prefill_request,
    registration,
)


@pytest.mark.parametrize(("asked", "first"), [(0, 0), (1, 1), (9, 1)])
def test_the_first_token_is_sampled_as_asked_but_alone(asked: int, first: int) -> None:
    spec = SamplingSpec(max_tokens=50, min_tokens=asked, temperature=0.3, seed=9, stop=("x",), logprobs=4)

    alone = next_token_sampling(spec)
    after_three = next_token_sampling(spec, 3)

    assert (alone.max_tokens, alone.min_tokens) == (1, first)
    assert (after_three.max_tokens, after_three.min_tokens) == (4, min(asked, 4))
    assert (alone.temperature, alone.seed, alone.stop, alone.logprobs) == (0.3, 9, ("x",), 4)


def test_a_prefill_job_carries_prompt_name_and_hand_off() -> None:
    job = prefill_job(prefill_request(temperature=0.0))

    assert (job.request_id, job.token_ids, job.hand_off, job.pull, job.emitted) == ("r#1", PROMPT, True, None, None)
    assert job.sampling.max_tokens == 1


def test_a_job_knows_the_span_that_its_engines_own_is_put_below() -> None:
    names = wire.RequestNames(traceparent="00-0abc-0def-01")

    jobs = (
        prefill_job(wire.PrefillRequest(named=names)),
        prefill_job(wire.PrefillSessionOpen(named=names)),
        decode_job(wire.DecodeRequest(named=names)),
    )

    assert {job.traceparent for job in jobs} == {"00-0abc-0def-01"}


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


async def test_prefill_answers_with_the_first_token_and_its_lease() -> None:
    engine = FakeEngine()

    response = await prefill(engine, prefill_request(temperature=0.0))

    text = expected_text(PROMPT, SamplingSpec(max_tokens=6))
    assert (response.first.text, list(response.first.token_ids)) == (text[0], [ord(text[0])])
    assert response.finish_reason == generation.FINISH_REASON_UNSPECIFIED
    assert (response.handoff.worker_id, response.handoff.generation) == ("w-0", 3)
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
