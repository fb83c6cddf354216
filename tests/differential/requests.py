"""Seeded requests to the four APIs, streamed and not: samplings of every kind, and errors. Pure."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

MODEL = "rachis-builtin"
_COLOURS = ("blue", "red", "lime", "melon", "pear", "beige")


@dataclass(frozen=True, slots=True)
class Request:
    path: str
    body: dict[str, Any]

    @property
    def is_streamed(self) -> bool:
        return bool(self.body.get("stream"))


def drawn(seed: int) -> Request:
    """One in six is wrong in some way."""
    rng = Random(seed)
    path, make = rng.choice(_APIS)
    body = make(rng)
    if rng.random() < 0.4:
        body["stream"] = True
        if path.endswith("completions") and rng.random() < 0.5:
            body["stream_options"] = {"include_usage": True}
    if rng.random() < 1 / 6:
        body |= rng.choice(_WRONG[path])
    return Request(path, {"model": MODEL, **body})


def _prompt(rng: Random) -> str:
    facts = [f"k{rng.randrange(1, 40)}={rng.choice(_COLOURS)}; " for _ in range(rng.choice((1, 3, 8, 40)))]
    return "".join(facts) + facts[0].partition("=")[0] + "="


def _turns(rng: Random) -> list[dict[str, str]]:
    turns = [{"role": "user", "content": _prompt(rng)}]
    if rng.random() < 0.3:
        turns = [{"role": "system", "content": "Answer. "}, *turns]
    if rng.random() < 0.3:
        turns += [{"role": "assistant", "content": "blue"}, {"role": "user", "content": _prompt(rng)}]
    return turns


def _sampling(rng: Random) -> dict[str, Any]:
    """Greedy, or with a seed: both sides have to say the same."""
    sampling: dict[str, Any] = {"max_tokens": rng.choice((1, 2, 6, 24, 60))}
    sampling |= rng.choice(({"temperature": 0}, {"temperature": 1.0, "seed": rng.randrange(-20, 1000)}))
    for name, values in _OPTIONS.items():
        if rng.random() < 0.2:
            sampling[name] = rng.choice(values)
    if "min_tokens" in sampling:
        sampling["min_tokens"] = min(sampling["min_tokens"], sampling["max_tokens"])
    return sampling


_OPTIONS: dict[str, tuple[Any, ...]] = {
    "top_p": (0.5, 0.9),
    "top_k": (5, 40),
    "min_p": (0.05,),
    "presence_penalty": (1.0, -0.5),
    "frequency_penalty": (0.7,),
    "repetition_penalty": (1.2, 1.9, 2.5),
    "stop": (["e;"], ["lu", "r"], "; "),
    "stop_token_ids": ([59], [32, 61]),
    "include_stop_str_in_output": (True,),
    "min_tokens": (4,),
    "ignore_eos": (True,),
    "n": (2, 3),
    "cache_salt": ("one", "two"),
    "priority": (-3, 7),
    "return_token_ids": (True,),
    "skip_special_tokens": (False,),
    "logit_bias": ({"59": -100}, {"32": 3.5, "61": -2}),
    "allowed_token_ids": ([59, 60, 61], list(range(32, 110))),
    "bad_words": (["blue"], ["e", "re"]),
}


_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"colour": {"enum": list(_COLOURS)}, "count": {"type": "integer", "minimum": 0, "maximum": 40}},
    "required": ["colour", "count"],
    "additionalProperties": False,
}
_STRUCTURED: tuple[dict[str, Any], ...] = (
    {"regex": "[a-f]{3}-[0-9]{2}"},
    {"choice": list(_COLOURS[:3])},
    {"json": _SCHEMA},
    {"json_object": True},
    {"grammar": 'root ::= "x" root | "y"'},
)
_FORMATS: tuple[dict[str, Any], ...] = (
    {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"name": "found", "schema": _SCHEMA}},
)
_TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": f"{name}s.", "parameters": _SCHEMA, "strict": is_strict},
    }
    for name, is_strict in (("paint", False), ("count", True))
]
# Beside these a grammar may find no token that is left.
_NARROWING = ("min_tokens", "ignore_eos", "logit_bias", "allowed_token_ids", "bad_words", "stop_token_ids")


def _structured(rng: Random, body: dict[str, Any], *, chat: bool) -> dict[str, Any]:
    """Some of them have to be something."""
    if rng.random() > 0.3:
        return body
    body = {name: value for name, value in body.items() if name not in _NARROWING}
    body["max_tokens"] = rng.choice((6, 100, 200))
    kind = rng.choice(("structured", "format", "tools") if chat else ("structured", "format"))
    if kind == "structured":
        return body | {"structured_outputs": rng.choice(_STRUCTURED)}
    if kind == "format":
        return body | {"response_format": rng.choice(_FORMATS)}
    named = {"type": "function", "function": {"name": "count"}}
    return body | {"tools": _TOOLS, "tool_choice": rng.choice(("auto", "none", "required", "required", named))}


def _completion(rng: Random) -> dict[str, Any]:
    body: dict[str, Any] = _structured(rng, {"prompt": _prompt(rng), **_sampling(rng)}, chat=False)
    if rng.random() < 0.2:
        body["prompt"] = rng.choice(([_prompt(rng), _prompt(rng)], [rng.randrange(1, 300) for _ in range(20)]))
    if rng.random() < 0.3:
        body["logprobs"] = rng.choice((1, 3))
    if rng.random() < 0.15:
        body["echo"] = True
    if rng.random() < 0.1:
        body["prompt_logprobs"] = rng.choice((0, 1, 4))
    return body


def _chat(rng: Random) -> dict[str, Any]:
    body = _structured(rng, {"messages": _turns(rng), **_sampling(rng)}, chat=True)
    if rng.random() < 0.3:
        body |= {"logprobs": True, "top_logprobs": rng.choice((0, 2))}
    if rng.random() < 0.1:
        body["prompt_logprobs"] = rng.choice((0, 3))
    return body


def _responses(rng: Random) -> dict[str, Any]:
    body: dict[str, Any] = {"input": _prompt(rng), "temperature": 0, "max_output_tokens": rng.choice((2, 6, 24))}
    return body | ({"instructions": "Answer. "} if rng.random() < 0.3 else {})


def _messages(rng: Random) -> dict[str, Any]:
    turns = [turn for turn in _turns(rng) if turn["role"] != "system"]
    body: dict[str, Any] = {"messages": turns, "max_tokens": rng.choice((2, 6, 24)), "temperature": 0}
    return body | ({"stop_sequences": ["lu"]} if rng.random() < 0.3 else {})


_APIS: tuple[tuple[str, Callable[[Random], dict[str, Any]]], ...] = (
    ("/v1/completions", _completion),
    ("/v1/completions", _completion),
    ("/v1/chat/completions", _chat),
    ("/v1/chat/completions", _chat),
    ("/v1/responses", _responses),
    ("/v1/messages", _messages),
)

_LONG = "k1=blue; " * 2000
_WRONG_SAMPLING: tuple[dict[str, Any], ...] = (
    {"model": "another"},
    {"temperature": -1},
    {"temperature": "warm"},
    {"max_tokens": 0},
    {"max_tokens": 100_000},
    {"top_p": 1.5},
    {"presence_penalty": 3},
    {"n": 0},
    {"stop_token_ids": "x"},
    {"structured_outputs": {"regex": "bad ("}},
    {"structured_outputs": {"json": {"type": "integer", "multipleOf": 3}}},
    {"structured_outputs": {"choice": []}},
    {"structured_outputs": {"regex": "a", "json_object": True}},
    {"structured_outputs": {"grammar": "root ::= nowhere"}},
    {"min_tokens": 99, "max_tokens": 3},
)
_WRONG: dict[str, tuple[dict[str, Any], ...]] = {
    "/v1/completions": (*_WRONG_SAMPLING, {"prompt": _LONG}, {"prompt": [399_999]}, {"logprobs": 50}),
    "/v1/chat/completions": (
        *_WRONG_SAMPLING,
        {"messages": []},
        {"messages": [{"role": "pope", "content": "x"}]},
        {"messages": [{"role": "user", "content": _LONG}]},
        {"top_logprobs": 3},
    ),
    "/v1/responses": ({"model": "another"}, {"temperature": -1}, {"input": _LONG}, {"input": 5}),
    "/v1/messages": ({"model": "another"}, {"max_tokens": 0}, {"messages": []}, {"temperature": -1}),
}
