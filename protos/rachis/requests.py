"""What a caller asks for, as messages of the API. A mistake in it is an InvalidInputError, which names the field."""

import math
from collections.abc import Mapping, MutableSequence
from typing import Any, TypeVar

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from rachis.errors import InvalidInputError
from rachis.v1 import generation_pb2 as generation

M = TypeVar("M", bound=Message)

# Longer than any service runs, and short enough for gRPC.
_FOREVER_S = 1e9
# More than any service gives; each is kept from the beginning.
_MOST_ANSWERS = 1024
_MODES = {"append": generation.SESSION_MODE_APPEND, "update": generation.SESSION_MODE_UPDATE}


def filled(message: M, given: Mapping[str, Any], within: str = "") -> M:
    """The message with these fields. A text where texts are wanted is one of them, as OpenAI's `stop` may be: a text is
    a sequence of texts, too. within: what its fields are part of. Raises InvalidInputError."""
    for name, value in given.items():
        field = message.DESCRIPTOR.fields_by_name[name]
        if isinstance(value, str) and isinstance(getattr(message, name), MutableSequence):
            value = [value]
        try:
            message.MergeFrom(type(message)(**{name: _of_field(field, value, f"{within}{name}.")}))
        except (TypeError, ValueError) as error:
            raise InvalidInputError.local(f"cannot be {_shown(value)}: {error}", field=within + name) from None
    return message


def sampling_of(given: Mapping[str, Any]) -> generation.SamplingParams:
    """Raises InvalidInputError."""
    unknown = given.keys() - generation.SamplingParams.DESCRIPTOR.fields_by_name.keys()
    if unknown:
        raise InvalidInputError.local("is no sampling parameter", field=f"sampling.{min(unknown)}")
    return filled(generation.SamplingParams(), given, "sampling.")


def wished(sampling: Mapping[str, Any], own: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """What an object of a framework asks for. own: its fields, over its `sampling`; one that is None says nothing.
    given: of one call, over all; what is None there is not asked for."""
    said = {name: value for name, value in own.items() if value is not None}
    return {name: value for name, value in {**sampling, **said, **given}.items() if value is not None}


def answers_of(n: int) -> int:
    """How many are asked for. Raises InvalidInputError."""
    if not isinstance(n, int) or n < 1:
        raise InvalidInputError.local(f"is {_shown(n)}, and at least 1", field="n")
    if n > _MOST_ANSWERS:
        raise InvalidInputError.local(f"is {_shown(n)}, and at most {_MOST_ANSWERS}", field="n")
    return n


def of_one_answer(wishes: Mapping[str, Any]) -> Mapping[str, Any]:
    """Raises InvalidInputError where several are wished for."""
    if "n" in wishes:
        raise InvalidInputError.local("is taken by `generate_choices` and `stream_choices`", field="n")
    return wishes


def mode_of(name: str) -> generation.SessionMode.ValueType:
    """Of a session. Raises InvalidInputError."""
    if not isinstance(name, str) or name not in _MODES:
        raise InvalidInputError.local(f"is {_shown(name)}, and {' or '.join(_MODES)}", field="mode")
    return _MODES[name]


def retries_of(most: int) -> int:
    """Of a request. Raises InvalidInputError."""
    if not isinstance(most, int) or most < 0:
        raise InvalidInputError.local(f"is {_shown(most)}, and at least 0", field="max_retries")
    return most


def seconds_of(timeout_s: float) -> float:
    """Of a call. Raises InvalidInputError."""
    if not isinstance(timeout_s, int | float) or math.isnan(timeout_s):
        raise InvalidInputError.local("is no number", field="timeout_s")
    return min(timeout_s, _FOREVER_S)


def _of_field(field: Any, value: Any, within: str) -> Any:
    """Of a part that is given as a dict, the message. field: its descriptor."""
    if field.message_type is None or field.message_type.GetOptions().map_entry or not isinstance(value, Mapping):
        return value
    unknown = value.keys() - field.message_type.fields_by_name.keys()
    if unknown:
        raise InvalidInputError.local("is no such field", field=f"{within}{min(unknown)}")
    return filled(GetMessageClass(field.message_type)(), value, within)


def _shown(value: Any) -> str:
    """Not all of a text that may be a book, and nothing that cannot be written."""
    return repr(value)[:60]
