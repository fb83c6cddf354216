"""Files of a batch: what is taken in, what is refused by its line, and how an output that is there is gone on with."""

import json
from contextlib import suppress
from typing import Any

import pytest

from cluster_core.errors import InvalidInputError
from command_line.batches.batch_file import BatchAnswer, BatchRequest, answer_line, answered, read_requests


def line(**given: Any) -> str:
    whole = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
    return json.dumps({name: value for name, value in (whole | given).items() if value is not None})


def test_requests_are_read_in_order_and_empty_lines_are_none() -> None:
    first, second = read_requests([line() + "\n", "\n", line(custom_id="b", method=None, url="/v1/responses")])
    assert first == BatchRequest("a", "/v1/completions", {"prompt": "x"})
    assert (second.custom_id, second.url) == ("b", "/v1/responses")


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ("{", "is no JSON"),
        ("[]", "must be an object"),
        (line(custom_id=None), "needs a custom_id"),
        (line(custom_id=7), "needs a custom_id"),
        (line(custom_id=""), "needs a custom_id"),
        (line(method="GET"), "must be POST"),
        (line(url="/v1/messages"), "must be one of /v1/chat/completions, /v1/completions, /v1/responses"),
        (line(url=None), "must be one of"),
        (line(body=None), "needs a body"),
        (line(body=[]), "needs a body"),
        (line(body={"stream": True}), "has `stream` in its body"),
        (line(body={"background": True}), "has `background` in its body"),
        (line(body={"prompt": "\ud83d"}), "has half a surrogate pair"),
        (line(custom_id="\ud83d"), "has half a surrogate pair"),
        (line(body={"temperature": float("nan")}), "has a number that is not finite"),
        (line(body={"temperature": 1}).replace("1}", "1e999}"), "has a number that is not finite"),
        ("[" * 100_000, "is no JSON"),
        (line(body={"x": 1}).replace("1}", "[" * 199 + "]" * 199 + "}"), "is nested more than 200 deep"),
        (line(extra=1), "has `extra`; known are body, custom_id, method, url"),
        (line(), "has the custom_id `a` again"),
    ],
)
def test_what_cannot_be_sent_is_refused_by_its_line(wrong: str, sentence: str) -> None:
    with pytest.raises(InvalidInputError, match=sentence) as raised:
        read_requests([line(), "", wrong])
    assert raised.value.field == "line 3"


def test_whatever_depth_a_line_has_it_is_sent_or_refused() -> None:
    """What reads it goes a level deeper than what writes it."""
    taken = []
    for levels in (*range(190, 200), *range(850, 1000)):
        body = '{"custom_id":"a","url":"/v1/completions","body":{"x":%s}}' % ("[" * levels + "]" * levels)
        with suppress(InvalidInputError):
            read_requests([body])
            taken.append(levels)
    assert taken == list(range(190, 199))


def test_a_file_without_requests_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="has no request"):
        read_requests(["\n", " "])


def test_an_answer_is_a_line_of_openais_format() -> None:
    request = BatchRequest("a", "/v1/completions", {})
    good = json.loads(answer_line(request, BatchAnswer(200, {"choices": []}, "r1"), "batch_req_1"))
    assert good == {
        "id": "batch_req_1",
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": "r1", "body": {"choices": []}},
        "error": None,
    }
    expired = json.loads(answer_line(request, BatchAnswer(code="batch_expired", message="late"), "batch_req_2"))
    assert expired["response"] is None and expired["error"] == {"code": "batch_expired", "message": "late"}


def test_whatever_text_an_answer_has_is_written_as_it_came() -> None:
    body = {"whole": "\U0001f600", "half": "\ud83d", "escaped": "\\ud83d"}
    written = answer_line(BatchRequest("a", "/v1/completions", {}), BatchAnswer(200, body), "x")
    assert json.loads(written)["response"]["body"] == body and written.endswith(b"\n")


def test_only_good_answers_on_whole_lines_need_not_be_asked_for_again() -> None:
    answers = [
        (BatchRequest("good", "", {}), BatchAnswer(200, {})),
        (BatchRequest("bad", "", {}), BatchAnswer(400, {})),
        (BatchRequest("expired", "", {}), BatchAnswer(code="batch_expired")),
    ]
    written = [answer_line(request, answer, "x") for request, answer in answers]
    torn = answer_line(BatchRequest("torn", "", {}), BatchAnswer(200, {}), "x")[:-1]
    assert answered([*written, torn]) == (frozenset({"good"}), sum(map(len, written)))


def test_a_file_that_no_batch_wrote_is_not_written_to() -> None:
    for foreign in (b"text\n", b"[]\n", b'{"response": 1}\n', b"{}\n"):
        with pytest.raises(InvalidInputError, match="give another output file"):
            answered([foreign])
