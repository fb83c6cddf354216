"""What a caller asks for, as messages of the API, and the mistakes in it."""

import math
from typing import Any, cast

import pytest
from rachis.errors import InvalidInputError
from rachis.metadata_channel import key_metadata
from rachis.prompts import chat_prompt, piece_of, prompt_of
from rachis.requests import (
    answers_of,
    filled,
    mode_of,
    of_one_answer,
    retries_of,
    sampling_of,
    seconds_of,
    wished,
)
from rachis.routers import target
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import router_pb2 as api


def test_a_text_where_texts_are_wanted_is_one_of_them() -> None:
    """Letter by letter it would stop at the first E."""
    sampling = sampling_of({"stop": "END", "bad_words": "no", "structured_outputs": {"choice": "ab"}})
    assert (list(sampling.stop), list(sampling.bad_words)) == (["END"], ["no"])
    assert list(sampling.structured_outputs.choice) == ["ab"]
    assert list(sampling_of({"stop": ["a", "b"]}).stop) == ["a", "b"]


def test_a_part_may_be_its_message_and_a_map_a_dict() -> None:
    given = {"structured_outputs": generation.StructuredOutputs(choice=["a"]), "logit_bias": {3: 0.5}}
    sampling = sampling_of(given)
    assert list(sampling.structured_outputs.choice) == ["a"] and dict(sampling.logit_bias) == {3: 0.5}


def test_a_field_that_nobody_has_set_leaves_what_sampling_says() -> None:
    sampling = {"stop": ["END"], "temperature": 0.0, "max_tokens": 5}
    own = {"temperature": None, "max_tokens": None, "stop": None}
    assert wished(sampling, own, {}) == sampling
    assert wished(sampling, own | {"max_tokens": 7}, {"temperature": 1.0}) == {
        **sampling,
        "max_tokens": 7,
        "temperature": 1.0,
    }
    assert wished(sampling, {"max_tokens": 7}, {"max_tokens": None}) == {"stop": ["END"], "temperature": 0.0}


@pytest.mark.parametrize(
    ("given", "field", "sentence"),
    [
        ({"top_q": 1}, "sampling.top_q", "is no sampling parameter"),
        ({"max_tokens": -1}, "sampling.max_tokens", "cannot be -1"),
        ({"stop": 7}, "sampling.stop", "cannot be 7"),
        ({"stop": ["\ud800"]}, "sampling.stop", "cannot be"),
        ({"structured_outputs": {"choices": ["a"]}}, "sampling.structured_outputs.choices", "is no such field"),
        ({"structured_outputs": {"regex": 7}}, "sampling.structured_outputs.regex", "cannot be 7"),
        ({"structured_outputs": "json"}, "sampling.structured_outputs", "cannot be 'json'"),
    ],
)
def test_a_mistake_in_sampling_names_its_field(given: dict[str, Any], field: str, sentence: str) -> None:
    with pytest.raises(InvalidInputError, match=sentence) as refused:
        sampling_of(given)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("message", "given"),
    [
        (api.GenerateRequest(), {"priority": 10**12}),
        (api.GenerateRequest(), {"priority": "high"}),
        (api.SessionOpen(), {"request_id": "\ud800"}),
        (admin.ListWorkersRequest(), {"hottest_prefixes": -1}),
    ],
)
def test_a_mistake_in_a_request_names_its_field(message: Any, given: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match="cannot be") as refused:
        filled(message, given)
    assert refused.value.field == next(iter(given))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ([-1], "out of range"),
        ([1 << 40], "out of range"),
        ("\ud800", "surrogates"),
        ([{"role": "user"}], "each chat message has a content"),
        ([{"role": "user", "content": 7}], "the content of a chat message is text, not int"),
        ([{"role": None, "content": "x"}], "the role of a chat message is text, not NoneType"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
            "the content of a chat message is text, not list",
        ),
        ([{"role": "assistant", "content": None, "tool_calls": [{}]}], "and no tool_calls; the HTTP API takes more"),
        ([{"role": "user", "content": "x", "name": "Ada"}], "and no name; the HTTP API takes more"),
        (7, "a prompt is text, token ids or chat messages, not int"),
        ({}, "a prompt is text, token ids or chat messages, not dict"),
        (["text"], "a prompt is text, token ids or chat messages, not list"),
    ],
)
def test_what_is_no_prompt_is_a_mistake_in_the_field_that_it_is_given_for(given: Any, sentence: str) -> None:
    with pytest.raises(InvalidInputError, match=rf"(?i){sentence}") as refused:
        prompt_of(given, "closing")
    assert refused.value.field == "closing"


def test_what_a_library_writes_down_as_none_says_nothing() -> None:
    given: dict[str, Any] = {"role": "assistant", "content": "x", "tool_calls": [], "refusal": None}
    assert chat_prompt([given]) == chat_prompt([{"role": "assistant", "content": "x"}])


@pytest.mark.parametrize("given", [[-1], "\ud800", 7, None])
def test_what_is_no_piece_is_a_mistake(given: Any) -> None:
    with pytest.raises(InvalidInputError) as refused:
        piece_of(given)
    assert refused.value.field == "piece"


def test_a_long_value_is_not_shown_in_full() -> None:
    with pytest.raises(InvalidInputError) as refused:
        filled(api.GenerateRequest(), {"priority": "x" * 10_000})
    assert len(str(refused.value)) < 300


def test_at_least_one_answer_is_asked_for() -> None:
    assert answers_of(3) == 3
    for n in (0, -1, "3", None):
        with pytest.raises(InvalidInputError, match=f"n: is {n!r}, and at least 1"):
            answers_of(cast(int, n))
    with pytest.raises(InvalidInputError, match="n: is 8589934592, and at most 1024"):
        answers_of(1 << 33)


@pytest.mark.parametrize(
    ("asked", "given", "sentence"),
    [
        (of_one_answer, {"n": 3}, "n: is taken by `generate_choices` and `stream_choices`"),
        (mode_of, "apend", "mode: is 'apend', and append or update"),
        (mode_of, ["append"], r"mode: is \['append'\], and append or update"),
        (retries_of, "2", "max_retries: is '2', and at least 0"),
        (retries_of, -1, "max_retries: is -1, and at least 0"),
        (target, None, "address: is None, and host:port"),
        (target, " ", "address: is ' ', and host:port"),
        (key_metadata, b"rk", "api_key: is no text"),
        (key_metadata, "rk-a\nrk-b", "api_key: must be at most 4096 printable ASCII characters"),
    ],
)
def test_what_a_client_is_told_in_a_wrong_way_is_named(asked: Any, given: Any, sentence: str) -> None:
    with pytest.raises(InvalidInputError, match=f"^{sentence}$"):
        asked(given)


def test_a_call_may_take_for_ever_and_no_time_and_nothing_else() -> None:
    assert seconds_of(0.5) == 0.5
    assert seconds_of(math.inf) == seconds_of(1e300) == 1e9
    for timeout_s in (math.nan, None, "1"):
        with pytest.raises(InvalidInputError, match="timeout_s: is no number"):
            seconds_of(cast(float, timeout_s))
