"""What a client may send over a WebSocket at `/v1/responses`: frames of JSON, judged before anything is done.

`response.create` is OpenAI's. `response.append`, `response.update` and `response.finish` are ours: they complete the
input of a response that was created with `generate: false`. Each mistake names the field and the limit, and leaves the
connection as it was. Nothing here knows vLLM: the fields of a request are judged there.
"""

import json
from dataclasses import dataclass, field
from typing import Any

STORE_AWAY = "Stored responses cannot be reached at the moment."
_TEXT = "input_text"
_CREATE_ONLY = frozenset({"type", "generate", "stream", "background", "previous_response_id", "input"})
# Named by OpenAI, and what they ask for is not done here. Other values than these would be dropped in silence.
_NOT_SERVED: dict[str, tuple[Any, ...]] = {
    "stream_id": (None,),
    "conversation": (None,),
    "context_management": (None, []),
    "moderation": (None,),
    "access_programs": (None,),
    "prompt": (None,),
    "n": (None, 1),
    "best_of": (None, 1),
    # The id of a response is the gateway's to give: it is what others continue from.
    "request_id": (None,),
}
# Of OpenAI's, without effect on the answer.
_WITHOUT_EFFECT = frozenset(
    {"client_metadata", "prompt_cache_options", "prompt_cache_retention", "safety_identifier", "stream_options"}
)


class SocketError(Exception):
    """What is answered with an error frame. param: the field at fault. headers: what HTTP would have had beside it."""

    def __init__(
        self,
        message: str,
        *,
        code: str,
        param: str | None = None,
        status: int = 400,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.param = param
        self.status = status
        self.headers = headers or {}

    def told(self) -> dict[str, Any]:
        """The object of a frame."""
        error: dict[str, Any] = {"type": _kind(self.status), "code": self.code}
        error |= {"message": str(self), "param": self.param}
        if self.headers:
            error["headers"] = self.headers
        return {"type": "error", "status": self.status, "error": error}

    def frame(self) -> str:
        return json.dumps(self.told())


def _kind(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


def not_found(response_id: str) -> SocketError:
    sentence = f"Previous response with id '{response_id}' not found."
    return SocketError(sentence, code="previous_response_not_found", param="previous_response_id")


def too_large(size: int, most: int) -> SocketError:
    """Of a conversation, in bytes of JSON."""
    sentence = f"The conversation would have {size} bytes as JSON, and {most} at most are taken."
    return SocketError(sentence, code="conversation_too_large", param="input")


def store_away(param: str) -> SocketError:
    return SocketError(STORE_AWAY, code="server_overloaded", param=param, status=503, headers={"Retry-After": "1"})


@dataclass(frozen=True, slots=True)
class Create:
    """fields: of a Responses request, without its input and what it continues. generates: False prepares only."""

    fields: dict[str, Any]
    items: tuple[dict[str, Any], ...]
    previous_response_id: str | None
    generates: bool


@dataclass(frozen=True, slots=True)
class Append:
    """More of the open input: whole items, or text for its last message."""

    items: tuple[dict[str, Any], ...] = ()
    text: str = ""


@dataclass(frozen=True, slots=True)
class Update:
    """The open input anew."""

    items: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Finish:
    """Generates from the open input, and what is added to it here."""

    more: Append = field(default_factory=Append)


ClientEvent = Create | Append | Update | Finish
KINDS = ("response.create", "response.append", "response.update", "response.finish")


def parsed(frame: str | bytes, max_bytes: int) -> ClientEvent:
    """Raises SocketError."""
    if isinstance(frame, bytes):
        raise SocketError("The frame is binary, and has to be JSON in text.", code="invalid_frame", param="frame")
    size = len(frame.encode(errors="surrogatepass"))
    if size > max_bytes:
        raise SocketError(
            f"The frame has {size} bytes, and {max_bytes} at most are taken.", code="frame_too_large", param="frame"
        )
    event = _json(frame)
    if not isinstance(event, dict):
        raise SocketError("The frame has to be a JSON object.", code="invalid_json", param="frame")
    kind = event.get("type")
    if kind == "response.create":
        return _create(event)
    if kind in KINDS:
        return _completing(str(kind), event)
    raise SocketError(
        f"type has to be one of {', '.join(KINDS)}, it is {_shown(kind)}.", code="unknown_event_type", param="type"
    )


def _json(frame: str) -> Any:
    try:
        event = json.loads(frame, parse_constant=_no_constant)
        if "\\u" in frame:
            # Half of a pair is no text that could go on from here.
            json.dumps(event, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise SocketError("The frame has text that is no valid Unicode.", code="invalid_json", param="frame") from None
    except RecursionError:
        raise SocketError("The frame's JSON is nested too deeply.", code="invalid_json", param="frame") from None
    except ValueError as error:
        raise SocketError(f"The frame is no valid JSON: {error}.", code="invalid_json", param="frame") from None
    return event


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _create(event: dict[str, Any]) -> Create:
    generates = event.get("generate")
    if generates is not None and not isinstance(generates, bool):
        raise _wrong_type("generate", "true or false", generates)
    if event.get("stream") not in (None, True):
        raise SocketError(
            f"stream is implied over a WebSocket and cannot be {_shown(event['stream'])}.",
            code="unsupported_parameter", param="stream",
        )  # fmt: skip
    if event.get("background") not in (None, False):
        raise SocketError(
            "background is not supported over a WebSocket.", code="unsupported_parameter", param="background"
        )
    for name, asks_for_nothing in _NOT_SERVED.items():
        if name in event and not _is_any(event[name], asks_for_nothing):
            raise SocketError(f"{name} is not supported by this service.", code="unsupported_parameter", param=name)
    previous = event.get("previous_response_id")
    if previous is not None and not isinstance(previous, str):
        raise _wrong_type("previous_response_id", "a string", previous)
    left_out = _CREATE_ONLY | _NOT_SERVED.keys() | _WITHOUT_EFFECT
    fields = {name: value for name, value in event.items() if name not in left_out}
    items = items_of(event.get("input"))
    if generates is not False and not items and previous is None:
        raise SocketError("input is missing.", code="missing_required_parameter", param="input")
    return Create(fields, items, previous, generates is not False)


def _completing(kind: str, event: dict[str, Any]) -> Append | Update | Finish:
    unknown = event.keys() - {"type", "input"} - (set() if kind == "response.update" else {"text"})
    if unknown:
        raise SocketError(f"{kind} has no field {min(unknown)}.", code="unknown_parameter", param=min(unknown))
    if kind == "response.update":
        if event.get("input") is None:
            raise SocketError("input is missing.", code="missing_required_parameter", param="input")
        return Update(items_of(event["input"]))
    text = event.get("text")
    if text is not None and not isinstance(text, str):
        raise _wrong_type("text", "a string", text)
    if text and event.get("input"):
        raise SocketError("text and input cannot be given together.", code="invalid_value", param="text")
    more = Append(items_of(event.get("input")), text or "")
    if kind == "response.finish":
        return Finish(more)
    if not more.items and not more.text:
        raise SocketError("text or input has to be given.", code="missing_required_parameter", param="input")
    return more


def items_of(given: Any) -> tuple[dict[str, Any], ...]:
    """The `input` of a request as items: a string is a user's message. Raises SocketError."""
    if given is None:
        return ()
    if isinstance(given, str):
        return ({"type": "message", "role": "user", "content": given},)
    if not isinstance(given, list):
        raise _wrong_type("input", "a string or a list of items", given)
    for number, item in enumerate(given):
        if not isinstance(item, dict):
            raise _wrong_type(f"input[{number}]", "an object", item)
    return tuple(given)


def has_open_message(items: tuple[dict[str, Any], ...]) -> bool:
    """Whether text can be added to the last item: it is a user's message whose content ends with text."""
    if not items or items[-1].get("type", "message") != "message" or items[-1].get("role") != "user":
        return False
    content = items[-1].get("content")
    if isinstance(content, str):
        return True
    last = content[-1] if isinstance(content, list) and content else None
    return isinstance(last, dict) and last.get("type") == _TEXT and isinstance(last.get("text"), str)


def with_text(items: tuple[dict[str, Any], ...], text: str) -> tuple[dict[str, Any], ...]:
    """With so much more in its last message. Raises SocketError where that is none that text can be added to."""
    if not text:
        return items
    if not has_open_message(items):
        raise SocketError(
            "text needs a last item that is a user's message and ends with text; send input instead.",
            code="invalid_value", param="text",
        )  # fmt: skip
    last = items[-1]
    content = last["content"]
    if isinstance(content, str):
        longer: Any = content + text
    else:
        longer = [*content[:-1], {**content[-1], "text": content[-1]["text"] + text}]
    return (*items[:-1], {**last, "content": longer})


def _is_any(value: Any, these: tuple[Any, ...]) -> bool:
    return any(value is each or (type(value) is type(each) and value == each) for each in these)


def _wrong_type(name: str, wanted: str, value: Any) -> SocketError:
    return SocketError(f"{name} has to be {wanted}, it is {_shown(value)}.", code="invalid_type", param=name)


def _shown(value: Any) -> str:
    try:
        shown = json.dumps(value)
    except RecursionError:
        # What could just be read cannot always be written.
        return "nested too deeply"
    return shown if len(shown) <= 40 else f"{shown[:40]}..."
