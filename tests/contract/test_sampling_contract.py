"""What the API promises of sampling vLLM takes: every field at both ends of its range; nothing beyond them passes."""

import math
from typing import Any

import pytest
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire

from cluster_core.engine_jobs import EngineJob, SamplingSpec
from cluster_core.errors import InvalidInputError, OutOfRangeError
from control_plane.intake.validation import _RANGES, check_sampling
from worker_runtime.wire_conversion import from_wire

MODEL = wire.ModelInfo(name="fake", vocabulary_size=256, max_model_len=512)
INTEGERS = {name for name, (_, _, highest) in _RANGES.items() if isinstance(highest, int) and name not in (
    "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"
)}  # fmt: skip


def ends(name: str) -> list[Any]:
    lowest, is_allowed, highest = _RANGES[name]
    return [lowest if is_allowed else math.nextafter(lowest, math.inf), highest]


def beyond(name: str) -> list[Any]:
    lowest, is_allowed, highest = _RANGES[name]
    if name in INTEGERS:
        return [value for value in (lowest - 1, highest + 1) if 0 <= value < 2**32]
    return [math.nextafter(lowest, -math.inf) if is_allowed else lowest, math.nextafter(highest, math.inf), math.nan]


def sampling(name: str, value: Any) -> generation.SamplingParams:
    others = {"max_tokens": 2**31 - 1} if name == "min_tokens" else {}
    return generation.SamplingParams(**{**others, name: value})


CASES = [(name, value) for name in _RANGES for value in ends(name)]


@pytest.mark.parametrize(("name", "value"), CASES, ids=lambda each: str(each))
def test_the_ends_of_every_range_are_taken_by_both(name: str, value: Any) -> None:
    from worker_runtime.vllm_conversion import sampling_params

    wished = sampling(name, value)
    check_sampling(wished, MODEL)
    params = sampling_params(EngineJob("r", (1, 2, 3), from_wire(wished, SamplingSpec)))
    assert getattr(params, name) == value or (name, value) == ("temperature", 0)


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name in _RANGES for value in beyond(name)], ids=lambda each: str(each)
)
def test_nothing_beyond_a_range_reaches_an_engine(name: str, value: Any) -> None:
    with pytest.raises(InvalidInputError, match=name):
        check_sampling(sampling(name, value), MODEL)


STEERED: dict[str, list[Any]] = {
    "logit_bias": [{5: 100.0, 255: -100.0}, dict.fromkeys(range(200), 0.5)],
    "allowed_token_ids": [[0, 255], list(range(256))],
}
NOT_STEERED: dict[str, list[Any]] = {
    "logit_bias": [{5: 100.5}, {5: math.nan}, {5: -math.inf}, {256: 1.0}, dict.fromkeys(range(1025), 1.0)],
    "allowed_token_ids": [[256], [5] * 1025],
}


STRUCTURED: list[dict[str, Any]] = [
    {"json": "{}" + " " * 65_534},
    {"json_object": True},
    {"regex": "a" * 65_536},
    {"regex": ""},
    {"choice": ["a"] * 1024},
    {"choice": ["a" * 32_768, "b" * 32_768]},
    {"grammar": 'root ::= "a"'},
    {"structural_tag": "{}"},
]
NOT_STRUCTURED: list[dict[str, Any]] = [
    {},
    {"regex": "a", "json_object": True},
    {"choice": ["a"], "grammar": 'root ::= "a"'},
    {"json_object": False},
    {"regex": "a" * 65_537},
    {"choice": ["a"] * 1025},
    {"choice": ["a" * 32_768, "b" * 32_769]},
]


@pytest.mark.parametrize("wanted", STRUCTURED, ids=lambda each: next(iter(each)))
def test_what_an_answer_has_to_be_is_taken_by_both(wanted: dict[str, Any]) -> None:
    from worker_runtime.vllm_conversion import sampling_params

    wished = generation.SamplingParams(structured_outputs=generation.StructuredOutputs(**wanted))
    check_sampling(wished, MODEL)
    params = sampling_params(EngineJob("r", (1, 2, 3), from_wire(wished, SamplingSpec)))
    ((name, value),) = wanted.items()
    assert params.structured_outputs is not None
    assert getattr(params.structured_outputs, name) == value


@pytest.mark.parametrize("wanted", NOT_STRUCTURED, ids=lambda each: "-".join(each) or "none")
def test_an_answer_has_to_be_one_thing_of_bounded_length(wanted: dict[str, Any]) -> None:
    wished = generation.SamplingParams(structured_outputs=generation.StructuredOutputs(**wanted))
    with pytest.raises((InvalidInputError, OutOfRangeError), match=r"sampling\.structured_outputs"):
        check_sampling(wished, MODEL)


@pytest.mark.parametrize(
    ("words", "is_taken"), [(["a" * 256] * 64, True), (["a"] * 65, False), (["a" * 257], False), ([" "], False)]
)
def test_words_that_are_not_to_come(words: list[str], is_taken: bool) -> None:
    from worker_runtime.vllm_conversion import sampling_params

    wished = generation.SamplingParams(bad_words=words)
    if is_taken:
        check_sampling(wished, MODEL)
        taken = sampling_params(EngineJob("r", (1, 2, 3), from_wire(wished, SamplingSpec)))
        assert taken.bad_words == sorted(set(words))
        return
    with pytest.raises(InvalidInputError, match="bad_words"):
        check_sampling(wished, MODEL)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in STEERED.items() for value in values])
def test_tokens_that_are_steered_are_taken_by_both(name: str, value: Any) -> None:
    from worker_runtime.vllm_conversion import sampling_params

    wished = sampling(name, value)
    check_sampling(wished, MODEL)
    assert getattr(sampling_params(EngineJob("r", (1, 2, 3), from_wire(wished, SamplingSpec))), name) == value


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in NOT_STEERED.items() for value in values])
def test_no_token_is_steered_beyond_the_limits(name: str, value: Any) -> None:
    with pytest.raises((InvalidInputError, OutOfRangeError), match=name):
        check_sampling(sampling(name, value), MODEL)
