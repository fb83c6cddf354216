"""Every field that a client sets, against its limit; the messages name the field."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire

from cluster_core.errors import ClientFault, InvalidInputError, OutOfRangeError
from control_plane import validation

MODEL = wire.ModelInfo(name="tiny", vocabulary_size=100, max_model_len=64)


def check(**fields: Any) -> None:
    validation.check_sampling(generation.SamplingParams(**fields), MODEL)


def test_absent_sampling_is_accepted() -> None:
    check()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0.0),
        ("temperature", 100.0),
        ("top_p", 1e-9),
        ("top_p", 1.0),
        ("top_k", 0),
        ("top_k", 2**31 - 1),
        ("min_p", 0.0),
        ("min_p", 1.0),
        ("seed", 0),
        ("seed", 2**63 - 1),
        ("presence_penalty", -2.0),
        ("presence_penalty", 2.0),
        ("frequency_penalty", -2.0),
        ("frequency_penalty", 2.0),
        ("repetition_penalty", 1e-9),
        ("repetition_penalty", 2.0),
        ("logprobs", 0),
        ("logprobs", 20),
        ("max_tokens", 1),
        ("max_tokens", 2**31 - 1),
        ("min_tokens", 128),
        ("stop", ["x"] * 16),
        ("stop", ["x" * 256]),
        ("stop_token_ids", [99] * 16),
    ],
)
def test_a_value_at_its_limit_is_accepted(field: str, value: Any) -> None:
    check(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.01),
        ("temperature", 100.5),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_k", 2**31),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("seed", 2**63),
        ("presence_penalty", -2.1),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", 2.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 2.1),
        ("logprobs", 21),
        ("max_tokens", 0),
        ("max_tokens", 2**31),
        ("min_tokens", 129),
        ("stop", ["x"] * 17),
        ("stop", [""]),
        ("stop", ["fine", "x" * 257]),
        ("stop_token_ids", [1] * 17),
    ],
)
def test_a_value_beyond_its_limit_is_refused_under_its_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidInputError, match=rf"^sampling\.{field}: ") as caught:
        check(**{field: value})

    assert caught.value.field == f"sampling.{field}"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "field", ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
)
def test_a_value_that_is_no_finite_number_is_refused_under_its_name(field: str, value: float) -> None:
    with pytest.raises(InvalidInputError) as caught:
        check(**{field: value})

    assert caught.value.field == f"sampling.{field}"


def test_every_numeric_sampling_field_has_a_range() -> None:
    unranged = {"stop", "stop_token_ids", "ignore_eos"}
    fields = set(generation.SamplingParams.DESCRIPTOR.fields_by_name)

    assert set(validation._RANGES) == fields - unranged


def test_min_tokens_above_max_tokens_is_refused_with_both_numbers() -> None:
    with pytest.raises(InvalidInputError, match=r"sampling\.min_tokens: must be at most max_tokens \(4\), got 5"):
        check(max_tokens=4, min_tokens=5)


def test_a_stop_token_outside_the_vocabulary_is_out_of_range() -> None:
    with pytest.raises(OutOfRangeError, match=r"sampling\.stop_token_ids: token 100 .* 100 tokens"):
        check(stop_token_ids=[3, 100])


@given(st.floats(), st.floats())
def test_no_pair_of_floats_is_accepted_outside_the_documented_ranges(temperature: float, top_p: float) -> None:
    documented = 0 <= temperature <= 100 and 0 < top_p <= 1
    try:
        check(temperature=temperature, top_p=top_p)
    except ClientFault:
        assert not documented
    else:
        assert documented


@pytest.mark.parametrize("name", ["", "a" * 128, "ünïcode-7", "with space"])
def test_a_printable_request_id_is_accepted(name: str) -> None:
    validation.check_request_id(name)


@pytest.mark.parametrize("salt", ["", "tenant 7", "ü" * 128])
def test_a_printable_cache_salt_is_accepted(salt: str) -> None:
    validation.check_cache_salt(salt)


@pytest.mark.parametrize("salt", ["a" * 129, "line\nbreak"])
def test_an_unprintable_or_long_cache_salt_is_refused(salt: str) -> None:
    with pytest.raises(InvalidInputError, match=r"^cache_salt: must be at most 128 printable characters"):
        validation.check_cache_salt(salt)


@pytest.mark.parametrize("priority", [-1000, 0, 1000])
def test_a_priority_within_the_limits_is_accepted(priority: int) -> None:
    validation.check_priority(priority)


@pytest.mark.parametrize("priority", [-1001, 1001, 2**31 - 1])
def test_a_priority_beyond_the_limits_is_refused_with_both(priority: int) -> None:
    with pytest.raises(InvalidInputError, match=rf"^priority: must be in \[-1000, 1000\], got {priority}$"):
        validation.check_priority(priority)


@pytest.mark.parametrize("name", ["a" * 129, "line\nbreak", "nul\0", "\u200bhidden"])
def test_an_unprintable_or_long_request_id_is_refused(name: str) -> None:
    with pytest.raises(InvalidInputError, match=r"^request_id: "):
        validation.check_request_id(name)


def test_no_model_and_the_served_model_are_accepted() -> None:
    validation.check_model("", "tiny")
    validation.check_model("tiny", "tiny")


def test_another_model_is_refused_with_both_names() -> None:
    with pytest.raises(InvalidInputError, match=r"^model: unknown model `other`; this cluster serves `tiny`"):
        validation.check_model("other", "tiny")


def chat(*messages: tuple[str, str]) -> generation.PromptInput:
    turns = [generation.ChatMessage(role=role, content=content) for role, content in messages]
    return generation.PromptInput(chat=generation.ChatMessages(messages=turns))


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        (generation.PromptInput(), "prompt"),
        (generation.PromptInput(text=""), "prompt.text"),
        (generation.PromptInput(token_ids=generation.TokenIds()), "prompt.token_ids"),
        (chat(), "prompt.chat.messages"),
        (chat(("user", "hi"), ("robot", "beep")), "prompt.chat.messages[1].role"),
    ],
)
def test_a_prompt_without_content_is_refused_under_its_name(prompt: generation.PromptInput, field: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        validation.check_prompt_form(prompt)

    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")


@pytest.mark.parametrize(
    "prompt",
    [
        generation.PromptInput(text="hi"),
        generation.PromptInput(token_ids=generation.TokenIds(ids=[0])),
        chat(("system", "s"), ("user", "u"), ("assistant", "a")),
    ],
)
def test_a_prompt_in_any_of_the_three_forms_is_accepted(prompt: generation.PromptInput) -> None:
    validation.check_prompt_form(prompt)


def check_tokens(token_ids: list[int], max_tokens: int) -> None:
    validation.check_tokens(token_ids, generation.SamplingParams(max_tokens=max_tokens), MODEL)


def test_prompt_and_completion_may_fill_the_models_length() -> None:
    check_tokens([99] * 60, 4)


def test_a_completion_beyond_the_models_length_names_max_tokens() -> None:
    with pytest.raises(OutOfRangeError, match=r"^sampling\.max_tokens: 60 .* 5 .* 65 together, .* length is 64"):
        check_tokens([1] * 60, 5)


def test_a_prompt_as_long_as_the_model_names_the_prompt() -> None:
    with pytest.raises(OutOfRangeError, match=r"^prompt: 64 prompt tokens"):
        check_tokens([1] * 64, 1)


def test_absent_max_tokens_counts_as_its_default() -> None:
    with pytest.raises(OutOfRangeError, match="128 max_tokens"):
        validation.check_tokens([1], generation.SamplingParams(), MODEL)


def test_a_token_outside_the_vocabulary_is_out_of_range() -> None:
    with pytest.raises(OutOfRangeError, match=r"^prompt\.token_ids: token 100 "):
        check_tokens([1, 100], 1)


def test_a_prompt_that_has_no_tokens_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"^prompt: has no tokens"):
        check_tokens([], 1)
