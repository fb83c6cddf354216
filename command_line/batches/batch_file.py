"""What a batch's files hold, by OpenAI's format: a request a line, and an answer a line. No file is opened here.

Source: OpenAI's Batch API, "Prepare your batch file"; vLLM's `run-batch` reads and writes the same.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cluster_core.errors import InvalidInputError

# Those whose requests can say that they are best effort.
URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
_FIELDS = frozenset({"custom_id", "method", "url", "body"})
_STATUS_OK = 200
# What writes JSON goes one call deeper with each level, and is itself called from some depth.
_MOST_LEVELS = 200


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One line."""

    custom_id: str
    url: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """What came of a request: an HTTP answer, or the code and the sentence of what there was instead of one."""

    status: int = 0
    body: Any = None
    # The service's name for it.
    request_id: str = ""
    code: str = ""
    message: str = ""

    @property
    def is_good(self) -> bool:
        return self.status == _STATUS_OK


def read_requests(lines: Iterable[str]) -> list[BatchRequest]:
    """All of a file; empty lines count for nothing. Raises InvalidInputError, which names the line."""
    found: dict[str, BatchRequest] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        request = _request(line, f"line {number}")
        if request.custom_id in found:
            raise InvalidInputError(f"has the custom_id `{request.custom_id}` again", field=f"line {number}")
        found[request.custom_id] = request
    if not found:
        raise InvalidInputError("has no request", field="the input file")
    return list(found.values())


def _request(line: str, where: str) -> BatchRequest:
    try:
        table = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"is no JSON: {error}", field=where) from None
    _check_can_be_sent(table, where)
    if not isinstance(table, dict):
        raise InvalidInputError("must be an object", field=where)
    unknown = sorted(table.keys() - _FIELDS)
    if unknown:
        raise InvalidInputError(f"has `{unknown[0]}`; known are {', '.join(sorted(_FIELDS))}", field=where)
    custom_id, url, body = table.get("custom_id"), table.get("url"), table.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        raise InvalidInputError("needs a custom_id, a text", field=where)
    if table.get("method", "POST") != "POST":
        raise InvalidInputError(f"has the method `{table['method']}`, must be POST", field=where)
    if url not in URLS:
        raise InvalidInputError(f"has the url `{url}`, must be one of {', '.join(URLS)}", field=where)
    if not isinstance(body, dict):
        raise InvalidInputError("needs a body, an object", field=where)
    for option in ("stream", "background"):
        if body.get(option):
            raise InvalidInputError(f"has `{option}` in its body: a batch's answers come whole", field=where)
    return BatchRequest(custom_id, url, body)


def _check_can_be_sent(value: object, where: str) -> None:
    """Python reads more than JSON over HTTP may say: halves of surrogate pairs, NaN and infinity; and deeper than it
    writes."""
    if _levels_beyond(value, _MOST_LEVELS):
        raise InvalidInputError(f"is nested more than {_MOST_LEVELS} deep", field=where)
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeError:
        raise InvalidInputError("has half a surrogate pair, which is no Unicode", field=where) from None
    except ValueError:
        raise InvalidInputError("has a number that is not finite, which is no JSON", field=where) from None


def _levels_beyond(value: object, most: int) -> bool:
    level = [value]
    for _ in range(most):
        within = [each for each in level if isinstance(each, dict | list)]
        level = [inner for each in within for inner in (each.values() if isinstance(each, dict) else each)]
    return any(isinstance(each, dict | list) for each in level)


def answered(lines: Iterable[bytes]) -> tuple[frozenset[str], int]:
    """Of an output file that is there already: the requests that need not be sent again, and its bytes that are whole.

    A line that its writer did not end is none; requests that failed are sent again. Raises InvalidInputError for a file
    that no batch wrote.
    """
    good: set[str] = set()
    whole_bytes = 0
    for number, line in enumerate(lines, 1):
        if not line.endswith(b"\n"):
            break
        whole_bytes += len(line)
        try:
            table = json.loads(line)
            if (table["response"] or {}).get("status_code") == _STATUS_OK:
                good.add(table["custom_id"])
        except (ValueError, TypeError, KeyError, AttributeError):
            raise InvalidInputError(
                "is no answer of a batch; give another output file", field=f"line {number} of the output file"
            ) from None
    return frozenset(good), whole_bytes


def answer_line(request: BatchRequest, answer: BatchAnswer, answer_id: str) -> bytes:
    """A line of the output, with its end."""
    response = {"status_code": answer.status, "request_id": answer.request_id, "body": answer.body}
    table = {
        "id": answer_id,
        "custom_id": request.custom_id,
        "response": response if answer.status else None,
        "error": {"code": answer.code, "message": answer.message} if answer.code else None,
    }
    # Half a surrogate pair that an answer has stays what it was there, an escape.
    return (json.dumps(table, ensure_ascii=False) + "\n").encode(errors="backslashreplace")
