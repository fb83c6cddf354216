"""Between the engine protocol's types and the messages of `rachis.v1`, by the rows of `worker_runtime.wire_table`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import partial
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire

from cluster_core.engine_jobs import SessionMode
from cluster_core.engine_reports import PrefixClaims
from cluster_core.errors import InvalidInputError
from worker_runtime.wire_table import ENUMS, ROWS, Row

_Message = TypeVar("_Message", bound=Message)
_Ours = TypeVar("_Ours")
_Convert = Callable[[Any], Any]

_SAME = (None, None)
# What messages have in place of tuples and mappings is their own, and changes with them.
_CONTAINERS: Mapping[Any, tuple[_Convert | None, _Convert | None]] = {tuple: (None, tuple), Mapping: (None, dict)}


def to_wire(ours: object, message: type[_Message], **given: Any) -> _Message:
    """`ours` as that message. given: fields of the message, instead of what ours has. KeyError: no row of the table."""
    values = {}
    for each in _CARRIED[type(ours), message]:
        value = getattr(ours, each.ours)
        if value is not None:
            values[each.theirs] = each.to_wire(value) if each.to_wire is not None else value
    return message(**values | given)


def from_wire(message: Message, ours: type[_Ours], **given: Any) -> _Ours:
    """The message as ours; what it leaves unset is as our default. given: fields of ours, instead of what the message
    has. KeyError: no row of the table."""
    values = {}
    for each in _CARRIED[ours, type(message)]:
        if each.ours not in given and not (each.may_be_absent and not message.HasField(each.theirs)):
            value = getattr(message, each.theirs)
            values[each.ours] = each.from_wire(value) if each.from_wire is not None else value
    return ours(**values, **given)


def session_mode_from_wire(mode: generation.SessionMode.ValueType) -> SessionMode:
    """Raises InvalidInputError for a mode that is none."""
    for ours, number in ENUMS[SessionMode].items():
        if number == mode:
            return SessionMode(ours)
    raise InvalidInputError("must be APPEND or UPDATE", field="open.mode")


def claims_to_wire(generation_number: int, sequence: int, claims: PrefixClaims) -> wire.GetPrefixClaimsResponse:
    """Keys travel packed: too many for a list of numbers."""
    return wire.GetPrefixClaimsResponse(
        generation=generation_number,
        sequence=sequence,
        device=np.fromiter(claims.device, dtype="<u8").tobytes(),
        host=np.fromiter(claims.host, dtype="<u8").tobytes(),
    )


@dataclass(frozen=True, slots=True)
class Carried:
    """A field of ours and the one of the message that it travels as."""

    ours: str
    theirs: str
    # None: the value is the same on both sides.
    to_wire: _Convert | None = None
    from_wire: _Convert | None = None
    # The message tells an absent value from zero.
    may_be_absent: bool = False


def carried_by(row: Row) -> tuple[Carried, ...]:
    """What one row carries: its pairs, and the fields that are called the same."""
    theirs = {field.name for field in row.message.DESCRIPTOR.fields} - row.given
    pairs = {field.name: row.pairs.get(field.name, field.name) for field in fields(row.ours)}
    return tuple(_carried(row, name, pair) for name, pair in pairs.items() if pair in theirs)


def _carried(row: Row, ours: str, theirs: str) -> Carried:
    descriptor = row.message.DESCRIPTOR.fields_by_name[theirs]
    hint, optional = _without_none(get_type_hints(row.ours)[ours])
    converts = _converters(hint, descriptor)
    if converts is _SAME and ours.endswith("_s") and theirs.endswith("_ms"):
        converts = (lambda seconds: seconds * 1000, lambda ms: ms / 1000)
    # A report inside a report that is not optional is there even where the message does not set it.
    may_be_absent = descriptor.has_presence and (optional or not is_dataclass(hint))
    return Carried(ours, theirs, *converts, may_be_absent)


def _converters(hint: Any, descriptor: Any) -> tuple[_Convert | None, _Convert | None]:
    """To the wire and back, of a field of that type."""
    if isinstance(hint, type) and issubclass(hint, Enum):
        numbers = ENUMS[hint]
        return numbers.__getitem__, {number: each for each, number in numbers.items()}.get
    if isinstance(hint, type) and is_dataclass(hint):
        nested = GetMessageClass(descriptor.message_type)
        return partial(to_wire, message=nested), partial(from_wire, ours=hint)
    kind, entry = get_origin(hint), next(iter(get_args(hint)), None)
    if kind is tuple and isinstance(entry, type) and is_dataclass(entry):
        nested = GetMessageClass(descriptor.message_type)
        return (
            lambda each: [to_wire(one, nested) for one in each],
            lambda each: tuple(from_wire(one, entry) for one in each),
        )
    return _CONTAINERS.get(kind, _SAME)


def _without_none(hint: Any) -> tuple[Any, bool]:
    """The type, and whether None is a value as well."""
    if get_origin(hint) not in (Union, UnionType):
        return hint, False
    (kind,) = [each for each in get_args(hint) if each is not NoneType]
    return kind, True


_CARRIED: Mapping[tuple[type, type[Message]], Sequence[Carried]] = {
    (row.ours, row.message): carried_by(row) for row in ROWS
}
