"""Messages drawn at random by somebody who knows the schema: extreme values, and bytes that do not parse."""

from collections.abc import Callable
from random import Random
from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor

_DEEPEST = 4
_TEXTS = ("", "a", "hello", "\x00", "é" * 40, "../" * 20, "x" * 300, "𝄞 \n\r\t", "decode-0", "9" * 2000)
_FLOATS = (0.0, -0.0, 0.5, 1.0, -1.0, 2.5, 1e-300, 1e300, float("nan"), float("inf"), float("-inf"))
_Draw = Callable[[Random], Any]


def _integers(bits: int, *, signed: bool) -> _Draw:
    least, most = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    return lambda rng: rng.choice((0, 1, 2, 17, 255, 256, least, most, rng.randint(least, most)))


_SCALARS: dict[int, _Draw] = {
    FieldDescriptor.CPPTYPE_BOOL: lambda rng: rng.random() < 0.5,
    FieldDescriptor.CPPTYPE_INT32: _integers(32, signed=True),
    FieldDescriptor.CPPTYPE_INT64: _integers(64, signed=True),
    FieldDescriptor.CPPTYPE_UINT32: _integers(32, signed=False),
    FieldDescriptor.CPPTYPE_UINT64: _integers(64, signed=False),
    FieldDescriptor.CPPTYPE_FLOAT: lambda rng: rng.choice(_FLOATS[:6]),
    FieldDescriptor.CPPTYPE_DOUBLE: lambda rng: rng.choice(_FLOATS),
}


def message(rng: Random, descriptor: Descriptor, depth: int = 0) -> Any:
    """Each field is there or not; how often differs from message to message."""
    made = message_factory.GetMessageClass(descriptor)()
    share = rng.choice((0.1, 0.5, 0.9))
    for field in descriptor.fields:
        if rng.random() > share:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            _fill_map(rng, made, field)
        elif field.is_repeated:
            values = getattr(made, field.name)
            for _ in range(rng.choice((1, 2, 5, 300) if field.message_type is None else (1, 2, 5))):
                _add(rng, values, field, depth)
        elif field.message_type is None:
            setattr(made, field.name, _scalar(rng, field))
        elif depth < _DEEPEST:
            getattr(made, field.name).CopyFrom(message(rng, field.message_type, depth + 1))
    return made


def damaged(rng: Random, data: bytes) -> bytes:
    """Half of all as they are; the others cut, changed, doubled, or with fields that nobody knows."""
    match rng.randrange(12):
        case 0:
            return data[: rng.randint(0, len(data))]
        case 1:
            place = rng.randint(0, len(data))
            return data[:place] + rng.randbytes(rng.randint(1, 8)) + data[place:]
        case 2 if data:
            changed = bytearray(data)
            for _ in range(rng.randint(1, 4)):
                changed[rng.randrange(len(changed))] = rng.randrange(256)
            return bytes(changed)
        case 3:
            return data + data
        case 4:
            # Field 999 of wire type 0, and one of a length that is not there.
            return data + b"\xb8\x3e\x01" + rng.choice((b"", b"\xba\x3e\xff\xff\xff\x7f"))
        case 5:
            # Groups in groups, and no end of them.
            return b"\x0b" * rng.choice((1, 50, 5000)) + data
        case _:
            return data


def _fill_map(rng: Random, made: Any, field: FieldDescriptor) -> None:
    assert field.message_type is not None
    key, value = field.message_type.fields_by_name["key"], field.message_type.fields_by_name["value"]
    if value.message_type is None:
        getattr(made, field.name)[_scalar(rng, key)] = _scalar(rng, value)


def _add(rng: Random, values: Any, field: FieldDescriptor, depth: int) -> None:
    if field.message_type is None:
        values.append(_scalar(rng, field))
    elif depth < _DEEPEST:
        values.add().CopyFrom(message(rng, field.message_type, depth + 1))


def _scalar(rng: Random, field: FieldDescriptor) -> Any:
    if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
        assert field.enum_type is not None
        return rng.choice((0, 1, 2, 999, *(value.number for value in field.enum_type.values)))
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        is_bytes = field.type == FieldDescriptor.TYPE_BYTES
        return rng.randbytes(rng.choice((0, 1, 200))) if is_bytes else rng.choice(_TEXTS)
    return _SCALARS[field.cpp_type](rng)
