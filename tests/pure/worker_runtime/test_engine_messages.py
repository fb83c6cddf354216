"""What an engine in a process of its own says of its jobs: outputs travel short where nothing is lost by it."""

import pickle
from dataclasses import fields, replace
from typing import Any

import pytest

from cluster_core.clock import UnixMs
from cluster_core.engine_jobs import (
    EngineOutput,
    FinishReason,
    HandoffReport,
    KvLease,
    PositionLogprobs,
    SessionProgress,
    SessionRecord,
    TokenLogprob,
)
from cluster_core.errors import InvalidInputError, OverloadedError, RachisError
from worker_runtime.engine_messages import HEADER, encoded, of_item

PLAIN = EngineOutput((1, 2), "ab")
_ROW = PositionLogprobs(TokenLogprob(1, -0.5, 1), ())
# A value of each field that an output has besides tokens and text.
MORE: dict[str, Any] = {
    "logprobs": (_ROW,),
    "prompt_logprobs": (_ROW,),
    "finish_reason": FinishReason.STOP,
    "cached_tokens": 3,
    "queue_ms": 0.5,
    "prefill_ms": 0.5,
    "handoff": HandoffReport(),
    "lease": KvLease("l", b"", UnixMs(0)),
    "session": SessionRecord(SessionProgress()),
}


def test_an_output_of_tokens_and_text_travels_as_these() -> None:
    assert of_item(7, PLAIN) == ("tokens", 7, (1, 2), "ab")


def test_each_other_field_is_known() -> None:
    assert {each.name for each in fields(EngineOutput)} == {"token_ids", "text", *MORE}


@pytest.mark.parametrize("field", MORE)
def test_an_output_with_anything_else_travels_whole(field: str) -> None:
    output = replace(PLAIN, **{field: MORE[field]})
    assert of_item(7, output) == ("item", 7, output)


@pytest.mark.parametrize(
    "error",
    [
        InvalidInputError("is bad", field="sampling.seed"),
        OverloadedError("is full", retry_after_ms=70),
        RachisError("is odd"),
    ],
)
def test_an_error_comes_as_it_left(error: RachisError) -> None:
    frame = encoded([of_item(7, error)])
    assert HEADER.unpack(frame[: HEADER.size]) == (len(frame) - HEADER.size,)
    ((_, _, came),) = pickle.loads(frame[HEADER.size :])
    assert (type(came), str(came), came.field, came.retry_after_ms) == (
        type(error),
        str(error),
        error.field,
        error.retry_after_ms,
    )
