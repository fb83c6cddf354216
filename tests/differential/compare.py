"""Two answers to one request, field by field, without what is made up each time; and the differences on purpose."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.differential.requests import Request

_MADE_UP = re.compile(
    r'"(cmpl|chatcmpl|resp|msg|modelperm|rs|fc|chatcmpl-tool)[-_][0-9a-f-]+"'
    r'|(?<="created":)\d+|(?<="created_at":)[0-9.]+|(?<="completed_at":)[0-9.]+|(?<="system_fingerprint":)"[^"]+"'
)
_CLOSE = 1e-3
_WITH_REASONING = "structured_outputs together with a reasoning parser"
# What vLLM says in place of minus infinity; of the tokens that a grammar forbids any may be told as the likeliest.
_IMPOSSIBLE = -9999.0


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    content_type: str
    text: str

    @property
    def is_stream(self) -> bool:
        return self.content_type.startswith("text/event-stream")


def explained(request: Request, ours: Answer, theirs: Answer) -> str:
    """Why they differ on purpose; empty where they should not."""
    if request.is_streamed and ours.status >= 400 and theirs.status == 200 and '"error"' in theirs.text:
        return "a stream that is refused has the refusal's status"
    if ours.status == 400 and _WITH_REASONING in ours.text:
        return "a grammar before the end of a reasoning is refused by name"
    return ""


def differences(request: Request, ours: Answer, theirs: Answer) -> list[str]:
    found = []
    if ours.status != theirs.status:
        found.append(f"status {ours.status}, not {theirs.status}")
    if ours.content_type != theirs.content_type:
        found.append(f"content type {ours.content_type}, not {theirs.content_type}")
    one, other = dict(_flat(_content(request, ours))), dict(_flat(_content(request, theirs)))
    for name in sorted(one.keys() | other.keys()):
        mine, yours = one.get(name, "<absent>"), other.get(name, "<absent>")
        if isinstance(mine, float) and isinstance(yours, float) and abs(mine - yours) < _CLOSE:
            continue
        # What was cached depends on what each was asked before.
        if mine != yours and "cache" not in name:
            found.append(f"{name}: {str(mine)[:120]}, not {str(yours)[:120]}")
    return found


def _content(request: Request, answer: Answer) -> Any:
    text = _MADE_UP.sub(lambda found: '"<made up>"' if '"' in found.group() else "0", answer.text)
    if answer.is_stream:
        events = [_loaded(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
        return _joined(events) if request.path.endswith("completions") else _joined_events(events)
    return _loaded(text)


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _joined(events: list[Any]) -> dict[str, Any]:
    """Chunks by their choice: where an answer is cut into chunks is a matter of time."""
    choices: dict[str, dict[str, Any]] = {}
    others = []
    for event in events:
        if not isinstance(event, Mapping) or "error" in event:
            others.append(event)
            continue
        for choice in event.get("choices", ()):
            joined = choices.setdefault(
                str(choice["index"]), {"text": "", "logprobs": [], "token_ids": [], "reasons": []}
            )
            delta = choice.get("delta") or {}
            joined["text"] += choice.get("text") or delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                function = call.get("function") or {}
                joined["text"] += (function.get("name") or "") + (function.get("arguments") or "")
            logprobs = choice.get("logprobs") or {}
            joined["logprobs"] += logprobs.get("token_logprobs") or [
                each["logprob"] for each in logprobs.get("content") or ()
            ]
            joined["token_ids"] += choice.get("token_ids") or []
            if choice.get("finish_reason"):
                joined["reasons"].append([choice["finish_reason"], choice.get("stop_reason")])
        if event.get("usage") and not event.get("choices"):
            others.append(event["usage"])
    return {"choices": choices, "others": others}


def _joined_events(events: list[Any]) -> list[Any]:
    """Events of one kind that follow each other are one; of their text, the sum."""
    joined: list[Any] = []
    for event in events:
        kind = event.get("type") if isinstance(event, Mapping) else None
        is_delta = kind is not None and kind.endswith("delta") and kind != "message_delta"
        if is_delta and joined and isinstance(joined[-1], dict) and joined[-1].get("type") == kind:
            joined[-1]["text"] += _delta_text(event)
        elif is_delta:
            joined.append({"type": kind, "text": _delta_text(event)})
        else:
            joined.append({name: each for name, each in event.items() if name != "sequence_number"} if kind else event)
    return joined


def _delta_text(event: Mapping[str, Any]) -> str:
    delta = event["delta"]
    return delta if isinstance(delta, str) else str(delta.get("text", delta))


def _is_impossible(logprob: object) -> bool:
    return isinstance(logprob, float) and logprob <= _IMPOSSIBLE


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        if _is_impossible(value.get("logprob")):
            yield f"{name}.logprob", _IMPOSSIBLE
            return
        for key, each in value.items():
            if not _is_impossible(each):
                yield from _flat(each, f"{name}.{key}")
    elif isinstance(value, list):
        yield f"{name}.length", len(value)
        for place, each in enumerate(value):
            yield from _flat(each, f"{name}[{place}]")
    else:
        yield name, value
