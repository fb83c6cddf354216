"""What the API promises of sampling vLLM takes: every field at both ends of its range; nothing beyond them passes."""

import math
from typing import Any

import pytest
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire

from cluster_core.engine_jobs import EngineJob, SamplingSpec
from cluster_core.errors import InvalidInputError
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
