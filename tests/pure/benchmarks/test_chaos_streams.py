"""What `rachis chaos` takes for a right answer, and for one that repeats a part of itself."""

import pytest
from rachis import Generated
from rachis.v1 import generation_pb2 as generation

from benchmarks.chaos_streams import is_right, repeats


def answer(tokens: list[int], text: str = "", likeliest: int = 7) -> Generated:
    rows = [
        generation.PositionLogprobs(
            sampled=generation.TokenLogprob(token_id=token), top=[generation.TokenLogprob(token_id=likeliest)]
        )
        for token in tokens
    ]
    return Generated(
        tokens, text or str(tokens), rows, generation.Completion(finish_reason=generation.FINISH_REASON_STOP)
    )


def test_an_answer_is_right_in_tokens_text_log_probabilities_and_its_reason_to_end() -> None:
    expected = answer([1, 2, 3])
    assert is_right(answer([1, 2, 3]), expected)
    assert not is_right(answer([1, 2]), expected)
    assert not is_right(answer([1, 2, 3], text="another"), expected)
    assert not is_right(answer([1, 2, 3], likeliest=8), expected)
    ended = answer([1, 2, 3])
    ended.completion.finish_reason = generation.FINISH_REASON_LENGTH
    assert not is_right(ended, expected)


@pytest.mark.parametrize("tokens", [[1, 2, 2, 3, 4], [1, 2, 3, 4, 4], [1, 1, 2, 3, 4], [1, 2, 3, 4, 1, 2, 3, 4]])
def test_an_answer_that_goes_back_repeats_itself(tokens: list[int]) -> None:
    assert repeats(tokens, [1, 2, 3, 4])


@pytest.mark.parametrize("tokens", [[1, 2, 3, 4], [1, 2, 4], [1, 2], [9, 9, 9, 9], [1, 2, 3, 9]])
def test_an_answer_that_is_right_short_or_another_one_does_not(tokens: list[int]) -> None:
    assert not repeats(tokens, [1, 2, 3, 4])
