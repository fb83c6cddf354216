"""What the comparison with `vllm serve` sees and what it looks past."""

import json
from collections import Counter
from typing import Any

import pytest

from tests.differential.compare import Answer, differences, explained
from tests.differential.requests import Request, drawn

JSON, STREAM = "application/json", "text/event-stream"
COMPLETION = Request("/v1/completions", {"prompt": "x"})


def _compact(value: Any) -> str:
    """As both servers write it."""
    return json.dumps(value, separators=(",", ":"))


def whole(**fields: Any) -> Answer:
    return Answer(200, JSON, _compact({"id": "cmpl-0a1b", "created": 17, "choices": [{"text": "blue"}], **fields}))


def streamed(*chunks: str, reason: str = "stop") -> Answer:
    events = [{"choices": [{"index": 0, "text": text, "finish_reason": None}]} for text in chunks]
    events.append({"choices": [{"index": 0, "text": "", "finish_reason": reason}]})
    return Answer(200, STREAM, "\n\n".join(f"data: {json.dumps(each)}" for each in events) + "\n\ndata: [DONE]\n\n")


def test_what_is_made_up_anew_is_looked_past() -> None:
    assert differences(COMPLETION, whole(), whole(id="cmpl-77", created=19)) == []
    one, other = (whole(usage={"prompt_tokens_details": {"cached_tokens": count}}) for count in (0, 32))
    assert differences(COMPLETION, one, other) == []


@pytest.mark.parametrize(
    "other",
    [whole(choices=[{"text": "red"}]), whole(more=1), Answer(400, JSON, whole().text), Answer(200, "text/plain", "x")],
)
def test_what_differs_is_told(other: Answer) -> None:
    assert differences(COMPLETION, whole(), other)
    assert not explained(COMPLETION, whole(), other)


def test_where_a_stream_is_cut_into_chunks_is_looked_past_and_its_text_is_not() -> None:
    assert differences(COMPLETION, streamed("bl", "ue"), streamed("blue")) == []
    assert differences(COMPLETION, streamed("blue"), streamed("red"))
    assert differences(COMPLETION, streamed("blue"), streamed("blue", reason="length"))


def test_which_forbidden_token_is_told_as_likely_is_looked_past() -> None:
    def chat(token: str, logprob: float) -> Answer:
        return whole(choices=[{"logprobs": {"content": [{"top_logprobs": [{"token": token, "logprob": logprob}]}]}}])

    def completion(token: str, logprob: float) -> Answer:
        return whole(choices=[{"logprobs": {"top_logprobs": [{"a": -0.5, token: logprob}]}}])

    for make in (chat, completion):
        assert differences(COMPLETION, make("b", -9999.0), make("c", -9999.0)) == []
        assert differences(COMPLETION, make("b", -3.0), make("c", -3.0))
        assert differences(COMPLETION, make("b", -3.0), make("b", -9999.0))


def test_a_refused_stream_has_its_status_on_purpose() -> None:
    request = Request("/v1/completions", {"prompt": "x", "stream": True})
    ours, theirs = Answer(400, JSON, '{"error": {}}'), Answer(200, STREAM, 'data: {"error": {}}\n\n')
    assert differences(request, ours, theirs)
    assert explained(request, ours, theirs)
    assert not explained(request, theirs, ours)


def test_a_grammar_beside_a_reasoning_is_refused_on_purpose() -> None:
    said = "structured_outputs together with a reasoning parser is not supported by this service"
    ours, theirs = Answer(400, JSON, f'{{"error": {{"message": "{said}"}}}}'), whole()
    assert explained(COMPLETION, ours, theirs)
    assert not explained(COMPLETION, Answer(400, JSON, '{"error": {}}'), theirs)


def test_requests_of_all_kinds_are_drawn_and_the_same_for_a_seed() -> None:
    requests = [drawn(seed) for seed in range(400)]
    assert requests == [drawn(seed) for seed in range(400)]
    assert min(Counter(each.path for each in requests).values()) > 40
    assert 100 < sum(each.is_streamed for each in requests) < 240
    assert {"logprobs", "n", "stop", "echo", "seed"} <= {name for each in requests for name in each.body}
