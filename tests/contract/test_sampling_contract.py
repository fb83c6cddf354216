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
