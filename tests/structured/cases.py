"""Seeded grammars of every kind, each with a prompt, a sampling, and how to tell one of its texts. Pure."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import jsonschema
from rachis.v1 import generation_pb2 as generation

from benchmarks.identity import Case

_WORDS = ("blue", "red", "lime", "melon", "pear", "beige", "the sky", "k1=", 'a "quoted" one', "é", "x\ny", "{}")
_MAX_NEW_TOKENS = 96


# Bytes in the order in which byte-level vocabularies begin: those that can be printed first.
_PRINTED = (*range(33, 127), *range(161, 173), *range(174, 256))
_IDS = {byte: number for number, byte in enumerate((*_PRINTED, *sorted(set(range(256)) - set(_PRINTED))))}


def byte_ids(text: str) -> tuple[int, ...]:
    """Tokens of the built-in model, one for each byte."""
    return tuple(_IDS[byte] for byte in text.encode())


@dataclass(frozen=True, slots=True)
class Grammar:
    """fields: of `rachis.v1.StructuredOutputs`. takes: whether a text that has ended is one of its texts."""

    fields: dict[str, Any]
    takes: Callable[[str], bool]


def drawn(seed: int) -> tuple[Case, Grammar]:
    rng = Random(seed)
    grammar = rng.choice(_KINDS)(rng)
    sampling: dict[str, Any] = {
        "structured_outputs": generation.StructuredOutputs(**grammar.fields),
        "max_tokens": rng.choice((1, 2, 24, _MAX_NEW_TOKENS, _MAX_NEW_TOKENS)),
        **rng.choice(({"temperature": 0.0}, {"temperature": 1.0, "seed": rng.randrange(1000)})),
    }
    if rng.random() < 0.3:
        sampling["logprobs"] = 2
    if rng.random() < 0.2:
        sampling |= {"presence_penalty": 1.0, "repetition_penalty": 1.3}
    prompt = "".join(f"k{rng.randrange(40)}={rng.choice(_WORDS)}; " for _ in range(rng.choice((1, 5, 40))))
    return Case(seed, byte_ids(prompt), sampling), grammar


def _json(rng: Random) -> Grammar:
    schema = _schema(rng, 3)
    if rng.random() < 0.2:
        schema = {
            "$defs": {"a": schema},
            "type": "object",
            "properties": {"x": {"$ref": "#/$defs/a"}},
            "required": ["x"],
        }
    return Grammar({"json": json.dumps(schema)}, partial(_is_json, schema))


def _schema(rng: Random, depth: int) -> dict[str, Any]:
    kinds = ["integer", "boolean", "string", "enum", "pattern", "null", "number"]
    kind = rng.choice([*kinds, *(["object", "array", "any"] * 2 if depth else [])])
    match kind:
        case "enum":
            return {"enum": rng.sample(_WORDS, rng.randint(1, 4))}
        case "pattern":
            return {"type": "string", "pattern": f"^[a-z]{{1,{rng.randint(1, 9)}}}$"}
        case "string":
            return {"type": "string", "maxLength": rng.randint(0, 12)}
        case "integer":
            low = rng.randint(-100, 100)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 1000)}
        case "object":
            names = rng.sample(("a", "b", "name", "long name", "é"), rng.randint(1, 3))
            fields = {name: _schema(rng, depth - 1) for name in names}
            return {"type": "object", "properties": fields, "required": names[:2], "additionalProperties": False}
        case "array":
            few = rng.randint(0, 2)
            return {"type": "array", "items": _schema(rng, depth - 1), "minItems": few, "maxItems": few + 2}
        case "any":
            return {"anyOf": [_schema(rng, depth - 1), _schema(rng, depth - 1)]}
    return {"type": kind}


def _regex(rng: Random) -> Grammar:
    low = rng.randint(1, 5)
    pattern = rng.choice((
        f"[a-f]{{{low},{low + 4}}}-[0-9]{{2}}",
        r"(red|blue|lime)( (red|blue|lime)){0,3}",
        r"\d{4}-(0[1-9]|1[0-2])-([0-2]\d)",
        r"[A-Z][a-z]*(\.[a-z]+)?@x\.(com|org)",
        r"(a|b){3,7}c?",
        r"k[0-9]+=[^;]{1,8};",
    ))  # fmt: skip
    return Grammar({"regex": pattern}, lambda text: re.fullmatch(pattern, text) is not None)


def _choice(rng: Random) -> Grammar:
    texts = rng.sample(_WORDS, rng.randint(1, 8))
    return Grammar({"choice": texts}, texts.__contains__)


def _grammar(rng: Random) -> Grammar:
    grammar, pattern = rng.choice((
        ('root ::= pair ("," pair)*\npair ::= [a-z]+ "=" [0-9]', r"[a-z]+=[0-9](,[a-z]+=[0-9])*"),
        ('root ::= "(" root ")" | "x"', r"\(*x\)*"),
        ('root ::= ("yes" | "no") ("!" | "?"){1,3}', r"(yes|no)[!?]{1,3}"),
    ))  # fmt: skip
    return Grammar({"grammar": grammar}, lambda text: re.fullmatch(pattern, text) is not None)


def _object(_rng: Random) -> Grammar:
    return Grammar({"json_object": True}, partial(_is_json, {"type": "object"}))


def _tag(rng: Random) -> Grammar:
    schema = _schema(rng, 1)
    content = {"type": "json_schema", "json_schema": schema}
    wrapped = {"type": "tag", "begin": "<a>", "content": content, "end": "</a>"}
    tag = {"type": "structural_tag", "format": wrapped}
    return Grammar(
        {"structural_tag": json.dumps(tag)},
        lambda text: text.startswith("<a>") and text.endswith("</a>") and _is_json(schema, text[3:-4]),
    )


_KINDS: tuple[Callable[[Random], Grammar], ...] = (
    _json,
    _json,
    _json,
    _regex,
    _regex,
    _choice,
    _grammar,
    _object,
    _tag,
)


def _is_json(schema: dict[str, Any], text: str) -> bool:
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True
