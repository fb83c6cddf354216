"""Bytes that are no message, answered with the field that is at fault."""

from collections.abc import Callable

import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import given
from hypothesis import strategies as st
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import router_pb2 as api

from cluster_core.errors import InvalidInputError, OutOfRangeError
from control_plane.intake.malformed_input import Malformed, MalformedInputInterceptor, invalid_utf8_field

GOOD = "good-text"
BAD = b"\xff" + b"x" * (len(GOOD) - 1)


def spoiled(message: Message) -> bytes:
    """The message's bytes with its one GOOD string replaced by bytes that are no UTF-8."""
    data = message.SerializeToString()
    assert data.count(GOOD.encode()) == 1
    return data.replace(GOOD.encode(), BAD)


def parse(data: bytes, limit: int = 1000) -> Message | Malformed:
    return MalformedInputInterceptor(limit).parse(api.GenerateRequest.FromString, data)


def chat(*contents: str) -> api.GenerateRequest:
    messages = [generation.ChatMessage(role="user", content=content) for content in contents]
    return api.GenerateRequest(prompt=generation.PromptInput(chat=generation.ChatMessages(messages=messages)))


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (api.GenerateRequest(model=GOOD), "model"),
        (api.GenerateRequest(request_id=GOOD, model="m"), "request_id"),
        (api.GenerateRequest(prompt=generation.PromptInput(text=GOOD)), "prompt.text"),
        (chat("fine", "füñ", GOOD), "prompt.chat.messages[2].content"),
        (chat(GOOD, "fine"), "prompt.chat.messages[0].content"),
        (api.GenerateRequest(sampling=generation.SamplingParams(stop=["a", "b", GOOD])), "sampling.stop[2]"),
    ],
)
def test_a_string_that_is_no_utf8_is_refused_under_its_path(message: api.GenerateRequest, field: str) -> None:
    answer = parse(spoiled(message))

    assert isinstance(answer, Malformed)
    assert isinstance(answer.error, InvalidInputError)
    assert (answer.error.field, str(answer.error)) == (field, f"{field}: is not valid UTF-8")


def test_the_path_is_found_in_messages_of_other_services() -> None:
    data = spoiled(admin.DrainWorkerRequest(worker_id=GOOD))

    assert invalid_utf8_field(admin.DrainWorkerRequest.DESCRIPTOR, data) == "worker_id"


def test_bytes_that_are_no_message_are_refused_as_the_whole_request() -> None:
    answer = parse(b"\x0a\xff\xff\xff\xff\xff")

    assert isinstance(answer, Malformed)
    assert isinstance(answer.error, InvalidInputError)
    assert answer.error.field == "request"


def test_a_message_over_the_limit_is_out_of_range_with_both_sizes() -> None:
    data = chat("x" * 100).SerializeToString()

    answer = parse(data, limit=len(data) - 1)

    assert isinstance(answer, Malformed)
    assert isinstance(answer.error, OutOfRangeError)
    assert str(answer.error) == f"request: has {len(data)} bytes, the limit is {len(data) - 1}"


def test_a_message_at_the_limit_is_parsed() -> None:
    message = chat("x" * 100)
    data = message.SerializeToString()

    assert parse(data, limit=len(data)) == message


def test_a_defect_of_a_deserializer_is_not_taken_for_bad_input() -> None:
    def broken(_data: bytes) -> Message:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        MalformedInputInterceptor(10).parse(broken, b"")


def test_a_deserializer_without_a_descriptor_still_answers_with_bad_input() -> None:
    def refuses(_data: bytes) -> Message:
        raise DecodeError

    answer = MalformedInputInterceptor(10).parse(refuses, b"")

    assert isinstance(answer, Malformed)
    assert answer.error.field == "request"


@given(st.binary(max_size=60))
@pytest.mark.parametrize("accepts", [api.GenerateRequest.FromString])
def test_any_bytes_give_a_message_or_a_refusal(accepts: Callable[[bytes], Message], data: bytes) -> None:
    answer = MalformedInputInterceptor(1000).parse(accepts, data)

    try:
        expected = accepts(data)
    except DecodeError:
        assert isinstance(answer, Malformed)
        assert answer.error.field
    else:
        if isinstance(answer, Malformed):
            assert "is not known here" in str(answer.error)
        else:
            assert answer == expected


def _with_unknown_field(message: Message, number: int = 99) -> bytes:
    """The message's bytes, and behind them a field of that number: a newer client's."""
    tag = number << 3
    return message.SerializeToString() + bytes([tag & 0x7F | 0x80, tag >> 7, 1])


def _nested_unknown() -> api.GenerateRequest:
    sampling = generation.SamplingParams.FromString(_with_unknown_field(generation.SamplingParams(max_tokens=3)))
    return api.GenerateRequest(prompt=generation.PromptInput(text="hello"), sampling=sampling)


def _unknown_in_a_list() -> api.GenerateRequest:
    turns = [generation.ChatMessage(role="user", content="a") for _ in range(3)]
    turns[1] = generation.ChatMessage.FromString(_with_unknown_field(turns[1]))
    return api.GenerateRequest(prompt=generation.PromptInput(chat=generation.ChatMessages(messages=turns)))


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (_with_unknown_field(api.GenerateRequest(request_id="r")), "99"),
        (_nested_unknown().SerializeToString(), "sampling.99"),
        (_unknown_in_a_list().SerializeToString(), "prompt.chat.messages[1].99"),
    ],
)
def test_a_wish_that_this_version_does_not_know_is_refused_by_name_and_not_left_out(data: bytes, field: str) -> None:
    refused = MalformedInputInterceptor(1 << 20).parse(api.GenerateRequest.FromString, data)
    assert isinstance(refused, Malformed)
    assert refused.error.status == "INVALID_ARGUMENT"
    assert str(refused.error).startswith(f"{field}: is not known here")
