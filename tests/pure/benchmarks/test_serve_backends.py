"""Prompts in pieces, and what is measured of an answer."""

from types import SimpleNamespace
from typing import Any

import pytest
from rachis.v1 import generation_pb2 as generation

from benchmarks.serve_backends import Pieces, measure


@pytest.mark.parametrize("count", [1, 2, 3, 7, 40])
def test_the_pieces_of_a_prompt_are_the_prompt(count: int) -> None:
    text = "one  two three\nfour five "
    assert "".join(Pieces(count).of(text)) == text
    assert [token for piece in Pieces(count).of([*range(11)]) for token in piece] == [*range(11)]
    assert len(Pieces(count).of(text)) == len(Pieces(count).of([1])) == count


def test_a_text_is_cut_where_words_begin() -> None:
    assert Pieces(2).of("one two three four") == ["one two ", "three four"]


async def test_times_count_from_the_last_piece() -> None:
    now = iter([0.0, 10.0, 10.5, 11.5, 11.75])
    output = SimpleNamespace(itl=[], ttft=0.0, generated_text="", success=False)

    async def answer() -> Any:
        yield 9.0
        for text in ("a", "b", "c"):
            yield generation.CompletionDelta(token_ids=[1], text=text)
        yield generation.Completion(usage=generation.Usage(completion_tokens=3))

    await measure(output, answer(), lambda: next(now))
    assert (output.ttft, output.itl, output.latency) == (1.0, [0.5, 1.0], 2.5)
    assert (output.generated_text, output.output_tokens, output.success) == ("abc", 3, True)
