"""Engine types and messages carry each other's fields under their own names, absent ones included."""

from dataclasses import asdict, fields
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire

from cluster_core.engine_jobs import EngineOutput, PositionLogprobs, SamplingSpec, StructuredOutputs, TokenLogprob
from cluster_core.engine_reports import (
    DecodeBatch,
    DecodeReport,
    EngineCounters,
    PolicyRow,
    PrefixGroup,
    TierReport,
    WaitingRequest,
)
from worker_runtime.wire_conversion import from_wire, to_wire

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
    "prompt_logprobs": 1,
    "min_tokens": 2,
    "ignore_eos": True,
    "stop": ["a", "bc"],
    "stop_token_ids": [3, 4],
    "logit_bias": {5: -1.5, 6: 100.0},
    "allowed_token_ids": [5, 6],
    "bad_words": ["b", "ad"],
    "structured_outputs": generation.StructuredOutputs(choice=["a", "b"]),
}


def test_sampling_from_wire_takes_over_every_field_that_is_set() -> None:
    spec = from_wire(generation.SamplingParams(**SET_SAMPLING), SamplingSpec)

    expected: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in SET_SAMPLING.items()
    } | {"structured_outputs": StructuredOutputs(choice=("a", "b"))}
    assert {field.name for field in fields(SamplingSpec)} == set(expected)
    assert spec == SamplingSpec(**expected)


def test_sampling_from_wire_leaves_the_protocols_defaults_for_the_rest() -> None:
    assert from_wire(generation.SamplingParams(), SamplingSpec) == SamplingSpec()


def test_every_field_of_the_sampling_message_reaches_the_engine() -> None:
    assert {field.name for field in generation.SamplingParams.DESCRIPTOR.fields} == set(SET_SAMPLING)


@pytest.mark.parametrize("name", sorted(name for name, value in SET_SAMPLING.items() if isinstance(value, int | float)))
def test_a_field_set_to_zero_is_not_taken_for_absent(name: str) -> None:
    zero: dict[str, Any] = {name: 0}

    spec = from_wire(generation.SamplingParams(**zero), SamplingSpec)

    assert getattr(spec, name) == 0
    assert getattr(spec, name) is not None


@pytest.mark.parametrize(
    "wanted",
    [
        {"json": '{"type": "object"}'},
        {"json_object": True},
        {"regex": ""},
        {"choice": ["a"]},
        {"grammar": 'root ::= "a"'},
        {"structural_tag": "{}"},
    ],
)
def test_what_an_answer_has_to_be_keeps_its_kind(wanted: dict[str, Any]) -> None:
    message = generation.StructuredOutputs(**wanted)
    ours = from_wire(message, StructuredOutputs)
    kept: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in wanted.items()}
    assert ours == StructuredOutputs(**kept)
    assert to_wire(ours, generation.StructuredOutputs) == message


def test_logprobs_keep_their_order_on_the_wire() -> None:
    row = PositionLogprobs(TokenLogprob(7, -3.0, 9), (TokenLogprob(1, -0.5, 1), TokenLogprob(2, -1.0, 2)))

    delta = to_wire(EngineOutput((7,), "x", (row,), prompt_logprobs=(row, row)), generation.CompletionDelta)

    [position] = delta.logprobs
    assert list(delta.prompt_logprobs) == [position, position]
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
