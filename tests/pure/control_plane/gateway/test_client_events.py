"""What a client may send over a WebSocket: what is taken, and how each mistake is named."""

import json
from typing import Any

import pytest

from control_plane.gateway.client_events import (
    Append,
    Create,
    Finish,
    SocketError,
    Update,
    has_open_message,
    items_of,
    parsed,
    with_text,
)

LIMIT = 4096
MESSAGE = {"type": "message", "role": "user", "content": "k1="}


def event(**fields: Any) -> str:
    return json.dumps({"type": "response.create", **fields})


def test_a_string_is_a_users_message() -> None:
    assert parsed(event(model="m", input="k1="), LIMIT) == Create({"model": "m"}, (MESSAGE,), None, True)


def test_what_a_connection_implies_is_no_field_of_the_request() -> None:
    said = parsed(event(input=[MESSAGE], stream=True, background=False, n=1, generate=None, conversation=None), LIMIT)
    assert said == Create({}, (MESSAGE,), None, True)


def test_what_has_no_effect_on_the_answer_is_left_out() -> None:
    assert parsed(event(input="k1=", safety_identifier="a", client_metadata={"b": 1}), LIMIT) == Create(
        {}, (MESSAGE,), None, True
    )


def test_preparing_needs_no_input_and_neither_does_going_on() -> None:
    assert parsed(event(generate=False, tools=[]), LIMIT) == Create({"tools": []}, (), None, False)
    assert parsed(event(previous_response_id="resp_1"), LIMIT) == Create({}, (), "resp_1", True)


def test_the_verbs_that_complete_an_input() -> None:
    assert parsed('{"type": "response.append", "text": "a"}', LIMIT) == Append(text="a")
    assert parsed('{"type": "response.append", "input": "k1="}', LIMIT) == Append((MESSAGE,))
    assert parsed('{"type": "response.update", "input": []}', LIMIT) == Update(())
    assert parsed('{"type": "response.finish"}', LIMIT) == Finish()
    assert parsed('{"type": "response.finish", "text": "a"}', LIMIT) == Finish(Append(text="a"))


@pytest.mark.parametrize(
    ("frame", "code", "param"),
    [
        ("no JSON", "invalid_json", "frame"),
        ('{"type": "response.create", "temperature": NaN}', "invalid_json", "frame"),
        ("[" * 3000, "invalid_json", "frame"),
        ("[1]", "invalid_json", "frame"),
        ('{"type": "response.create", "input": "\\ud800"}', "invalid_json", "frame"),
        (b"{}", "invalid_frame", "frame"),
        ("{" + " " * LIMIT + "}", "frame_too_large", "frame"),
        ("é" * (LIMIT // 2 + 1), "frame_too_large", "frame"),
        ("{}", "unknown_event_type", "type"),
        ('{"type": 5}', "unknown_event_type", "type"),
        ('{"type": "response.steer", "input": "x"}', "unknown_event_type", "type"),
        (event(), "missing_required_parameter", "input"),
        (event(input=[]), "missing_required_parameter", "input"),
        (event(input=5), "invalid_type", "input"),
        (event(input=[MESSAGE, "x"]), "invalid_type", "input[1]"),
        (event(input="x", generate="no"), "invalid_type", "generate"),
        (event(input="x", previous_response_id=["r"]), "invalid_type", "previous_response_id"),
        (event(input="x", stream=False), "unsupported_parameter", "stream"),
        (event(input="x", background=True), "unsupported_parameter", "background"),
        (event(input="x", n=2), "unsupported_parameter", "n"),
        (event(input="x", n=True), "unsupported_parameter", "n"),
        (event(input="x", stream_id="lane"), "unsupported_parameter", "stream_id"),
        (event(input="x", conversation="c"), "unsupported_parameter", "conversation"),
        (event(input="x", request_id="r"), "unsupported_parameter", "request_id"),
        ('{"type": "response.append"}', "missing_required_parameter", "input"),
        ('{"type": "response.append", "text": 5}', "invalid_type", "text"),
        ('{"type": "response.append", "text": "a", "input": "b"}', "invalid_value", "text"),
        ('{"type": "response.append", "text": "a", "model": "m"}', "unknown_parameter", "model"),
        ('{"type": "response.update"}', "missing_required_parameter", "input"),
        ('{"type": "response.update", "text": "a"}', "unknown_parameter", "text"),
        ('{"type": "response.finish", "max_output_tokens": 3}', "unknown_parameter", "max_output_tokens"),
    ],
)
def test_a_mistake_names_its_field(frame: str | bytes, code: str, param: str) -> None:
    with pytest.raises(SocketError) as refused:
        parsed(frame, LIMIT)
    assert (refused.value.code, refused.value.param, refused.value.status) == (code, param, 400)
    said = json.loads(refused.value.frame())
    assert (said["type"], said["status"]) == ("error", 400)
    assert said["error"] == {
        "type": "invalid_request_error", "code": code, "message": str(refused.value), "param": param,
    }  # fmt: skip


def test_what_is_nested_as_deeply_as_can_be_read_is_refused_in_order() -> None:
    """Reading takes a frame of the stack less than showing."""
    for kind in ('{"type": "response.create", "input": "x", "generate": %s}', '{"type": %s}'):
        for depth in range(800, 1000):
            with pytest.raises(SocketError):
                parsed(kind % ("[" * depth + "]" * depth), LIMIT)


def test_a_limit_stands_in_the_sentence() -> None:
    with pytest.raises(SocketError, match="has 10 bytes, and 9 at most"):
        parsed("0123456789", 9)


def test_what_http_has_beside_its_body_stands_in_the_error() -> None:
    said = json.loads(SocketError("full", code="c", status=429, headers={"Retry-After": "1"}).frame())
    assert (said["error"]["type"], said["error"]["headers"]) == ("rate_limit_error", {"Retry-After": "1"})
    assert json.loads(SocketError("away", code="c", status=503).frame())["error"]["type"] == "server_error"


def test_text_is_added_to_the_last_message_of_a_user() -> None:
    parts = {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]}
    assert with_text(items_of("k1"), "7=")[-1]["content"] == "k17="
    assert with_text((MESSAGE, parts), "c")[-1]["content"][-1] == {"type": "input_text", "text": "bc"}
    assert parts["content"][-1] == {"type": "input_text", "text": "b"}, "the item of before is left alone"
    assert with_text((), "") == ()


@pytest.mark.parametrize(
    "last",
    [
        {"type": "message", "role": "assistant", "content": "a"},
        {"type": "function_call_output", "call_id": "c", "output": "a"},
        {"role": "user", "content": []},
        {"role": "user", "content": [{"type": "input_image", "image_url": "u"}]},
        {"role": "user", "content": [{"type": "input_text", "text": 5}]},
        {"role": "user"},
    ],
)
def test_text_is_added_to_nothing_else(last: dict[str, Any]) -> None:
    assert not has_open_message((last,))
    with pytest.raises(SocketError, match="a user's message"):
        with_text((last,), "more")
