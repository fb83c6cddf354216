"""The comparison with plain vLLM finds what differs, and its cases vary as they should."""

import dataclasses
from typing import Any

import pytest
from rachis import Generated
from rachis.v1 import generation_pb2 as generation

from benchmarks.identity import MAX_NEW_TOKENS, Case, difference, make_cases

CASE = Case(0, (1, 2, 3), {"max_tokens": 3})


def generated(**changes: Any) -> Generated:
    def row(token: int, logprob: float) -> generation.PositionLogprobs:
        likeliest = [generation.TokenLogprob(token_id=token, logprob=logprob, rank=1)]
        runner_up = [generation.TokenLogprob(token_id=99, logprob=logprob - 0.25, rank=2)]
        return generation.PositionLogprobs(sampled=likeliest[0], top=likeliest + runner_up)

    whole = Generated(
        token_ids=[7, 8, 9],
        text="abc",
        logprobs=[row(7, -0.5), row(8, -1.0), row(9, -1.5)],
        completion=generation.Completion(finish_reason=generation.FINISH_REASON_LENGTH),
    )
    return dataclasses.replace(whole, **changes)


def test_equal_completions_do_not_differ() -> None:
    assert difference(CASE, generated(), generated(), 1e-3) is None


def test_the_first_different_token_is_found_with_its_gap() -> None:
    found = difference(CASE, generated(token_ids=[7, 5, 9]), generated())
    assert found is not None
    assert (found.what, found.position, found.cluster_token, found.plain_token) == ("tokens", 1, 5, 8)
    assert found.gap == pytest.approx(0.25)


def test_a_missing_token_differs() -> None:
    found = difference(CASE, generated(token_ids=[7, 8]), generated())
    assert found is not None and (found.position, found.cluster_token, found.plain_token) == (2, None, 9)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"text": "abd"}, "text"),
        ({"completion": generation.Completion(finish_reason=generation.FINISH_REASON_STOP)}, "finish reason"),
        ({"logprobs": []}, "log-probabilities"),
    ],
)
def test_whatever_else_differs_is_named(changes: dict[str, Any], what: str) -> None:
    found = difference(CASE, generated(**changes), generated(), 1e-3)
    assert found is not None and found.what == what


def test_log_probabilities_are_compared_only_where_a_tolerance_is_given() -> None:
    shifted = generated()
    shifted.logprobs[1].sampled.logprob -= 0.01
    assert difference(CASE, shifted, generated()) is None
    assert difference(CASE, shifted, generated(), 0.1) is None
    found = difference(CASE, shifted, generated(), 1e-3)
    assert found is not None and found.what == "log-probabilities"


def test_cases_are_the_same_for_a_seed_and_cover_lengths_and_options() -> None:
    cases = make_cases(60, 3, 400, 4096, None)
    assert cases == make_cases(60, 3, 400, 4096, None) != make_cases(60, 4, 400, 4096, None)
    lengths = {len(case.token_ids) for case in cases}
    assert {1, 31, 32, 33, 1500} <= lengths
    assert sum(case.sampling["temperature"] == 0 for case in cases) == 30
    options = {name for case in cases for name in case.sampling}
    assert {"top_p", "top_k", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty"} <= options
    assert {"repetition_penalty", "logprobs", "ignore_eos", "min_tokens"} <= options


def test_cases_fit_a_short_model() -> None:
    cases = make_cases(30, 0, 400, 64, None)
    assert max(len(case.token_ids) for case in cases) + MAX_NEW_TOKENS <= 64
