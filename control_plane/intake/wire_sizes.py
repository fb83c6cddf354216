"""Looks at a message's bytes before they are parsed: what has more entries than any prompt may is refused for that.

Parsing holds the event loop: fifteen million token ids of a byte each take 150 ms, and hundreds of megabytes of memory.
Only lengths and tags are read here (https://protobuf.dev/programming-guides/encoding), in as many steps as there are
fields, and these are bounded. Bytes that are no message are left to the parser. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from cluster_core.errors import InvalidInputError, OutOfRangeError
from control_plane.model.limits import MOST_ENTRIES

# Of a message with all in it, whatever they are.
_MOST_FIELDS = 5 * MOST_ENTRIES
_MOST_VARINT_BYTES = 5
_FIXED_BYTES = {1: 8, 5: 4}
_VARINT, _LENGTH = 0, 2
_TEXTS = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)


class _Unreadable(Exception):
    """The parser will say so."""


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    is_repeated: bool
    # Of a message; None of text and of packed numbers.
    nested: Descriptor | None
    is_packed: bool


@dataclass(slots=True)
class _Look:
    most_numbers: int
    numbers_bytes: int = 0
    fields: int = 0

    def message(self, data: bytes, start: int, end: int, descriptor: Descriptor, path: str) -> None:
        known, entries = _fields(descriptor), dict[int, int]()
        while start < end:
            self.fields += 1
            if self.fields > _MOST_FIELDS:
                raise OutOfRangeError(f"has more than {_MOST_FIELDS} fields", field=path.rstrip(".") or "request")
            tag, start = self._varint(data, start, end)
            kind, field = tag & 7, known.get(tag >> 3)
            if field is not None and field.is_repeated:
                entries[tag >> 3] = entries.get(tag >> 3, 0) + 1
                if entries[tag >> 3] > MOST_ENTRIES:
                    form = " that are not packed" if field.is_packed else ""
                    raise OutOfRangeError(f"has more than {MOST_ENTRIES} entries{form}", field=path + field.name)
            if kind == _VARINT:
                _, start = self._varint(data, start, end)
                continue
            size, start = self._varint(data, start, end) if kind == _LENGTH else (_FIXED_BYTES.get(kind), start)
            if size is None:
                # Groups, which no message of ours has, and kinds that there are not.
                raise InvalidInputError(
                    "is not known here: what it asks for would be left out", field=f"{path}{tag >> 3}"
                )
            if start + size > end:
                raise _Unreadable
            if field is not None and kind == _LENGTH:
                self._inside(data, start, size, field, path)
            start += size

    def _inside(self, data: bytes, start: int, size: int, field: _Field, path: str) -> None:
        if field.nested is not None:
            self.message(data, start, start + size, field.nested, f"{path}{field.name}.")
        elif field.is_packed:
            self.numbers_bytes += size
            if self.numbers_bytes > self.most_numbers * _MOST_VARINT_BYTES:
                raise OutOfRangeError(f"has more than {self.most_numbers} entries", field=path + field.name)

    def _varint(self, data: bytes, start: int, end: int) -> tuple[int, int]:
        """The number, and where what follows it begins. Each byte after the first is as much work as a field."""
        if start < end and data[start] < 0x80:
            return data[start], start + 1
        value = shift = 0
        while start < end and shift <= 63:
            byte = data[start]
            start += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                self.fields += shift // 14
                return value, start
            shift += 7
        raise _Unreadable


def check_sizes(data: bytes, descriptor: Descriptor, most_numbers: int) -> None:
    """most_numbers: packed numbers in the whole message, such as token ids. Raises ClientFault with the field."""
    try:
        _Look(most_numbers).message(data, 0, len(data), descriptor, "")
    except _Unreadable:
        return


@cache
def _fields(descriptor: Descriptor) -> Mapping[int, _Field]:
    return {
        field.number: _Field(field.name, field.is_repeated, field.message_type, field.type not in _TEXTS)
        for field in descriptor.fields
    }
