"""What protobuf refuses to parse, or leaves out in silence, answered as bad input that names the field.

gRPC hands a message to its deserializer before any handler runs, and answers INTERNAL when that raises. So the
deserializers of our services are wrapped by an interceptor: what does not parse, or is too large, arrives at the
handler as a `Malformed`, which aborts the call with the sentence. A handler that reads a stream of messages gets
the `Malformed` itself among them, and answers it as it answers any bad message.
"""

import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from cluster_core.errors import ClientFault, InvalidInputError, OutOfRangeError, RachisError
from cluster_wire import calls
from cluster_wire.calls import Context
from control_plane.intake.wire_sizes import check_sizes

# Of a list: those that are longer than any limit are refused for it.
_MOST_LOOKED_AT = 5000
# What is smaller is parsed at once.
_SMALL_BYTES = 16 << 10
# Where no model says how long a prompt may be.
MOST_NUMBERS = 1 << 20
_OUR_METHODS = "/rachis.v1."


@dataclass(frozen=True, slots=True)
class Malformed:
    error: RachisError


class MalformedInputInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Wraps every handler of ours; `max_message_bytes` is the limit that clients are told. most_numbers: token ids
    that a message may have, at the time."""

    def __init__(self, max_message_bytes: int, most_numbers: Callable[[], int] = lambda: MOST_NUMBERS) -> None:
        self._max_message_bytes = max_message_bytes
        self._most_numbers = most_numbers

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        ours = handler_call_details.method.startswith(_OUR_METHODS)
        if not ours or handler is None or handler.request_deserializer is None:
            return handler
        parse = functools.partial(self.parse, handler.request_deserializer)
        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(
                _checked(handler.stream_stream), parse, handler.response_serializer
            )
        if handler.response_streaming:
            behaviour = handler.unary_stream
            checked = _checked_stream if inspect.isasyncgenfunction(behaviour) else _checked
            return grpc.unary_stream_rpc_method_handler(checked(behaviour), parse, handler.response_serializer)
        return grpc.unary_unary_rpc_method_handler(_checked(handler.unary_unary), parse, handler.response_serializer)

    def parse(self, deserializer: Callable[[bytes], Message], data: bytes) -> Message | Malformed:
        """What the deserializer makes of it, or what is wrong with it."""
        if len(data) > self._max_message_bytes:
            return Malformed(
                OutOfRangeError(f"has {len(data)} bytes, the limit is {self._max_message_bytes}", field="request")
            )
        kind = getattr(deserializer, "__self__", None)
        try:
            if kind is not None and len(data) > _SMALL_BYTES:
                check_sizes(data, kind.DESCRIPTOR, self._most_numbers())
            message = deserializer(data)
            unknown = unknown_field(message)
            if unknown:
                sentence = "is not known here: what it asks for would be left out"
                return Malformed(InvalidInputError(sentence, field=unknown))
            return message
        except ClientFault as error:
            return Malformed(error)
        except DecodeError:
            field = invalid_utf8_field(kind.DESCRIPTOR, data) if kind is not None else None
            if field is None:
                return Malformed(InvalidInputError("is not a message of this method", field="request"))
            return Malformed(InvalidInputError("is not valid UTF-8", field=field))


def unknown_field(message: Message) -> str:
    """The first field that the message's type does not have, as a path that ends in its number; empty: there is none.

    protobuf keeps such fields and says nothing, so that a wish from a newer schema would be dropped in silence.
    """
    return _first_unknown(message, "")


def _first_unknown(message: Message, prefix: str) -> str:
    unknown = UnknownFieldSet(message)
    if len(unknown):
        return f"{prefix}{unknown[0].field_number}"
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for index, item in enumerate(islice(value, _MOST_LOOKED_AT) if field.is_repeated else [value]):
            path = f"{prefix}{field.name}" + (f"[{index}]" if field.is_repeated else "")
            found = _first_unknown(item, f"{path}.")
            if found:
                return found
    return ""


def invalid_utf8_field(descriptor: Descriptor, data: bytes) -> str | None:
    """The dotted path of the first string in `data` that is not UTF-8, or None when that is not what is wrong.

    The message is parsed once more as a copy of its type in which every string is bytes.
    """
    message = message_factory.GetMessageClass(_bytes_pool(descriptor).FindMessageTypeByName(descriptor.full_name))()
    try:
        message.ParseFromString(data)
    except DecodeError:
        return None
    return _first_invalid(message, descriptor, "")


@functools.cache
def _bytes_pool(descriptor: Descriptor) -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    _add_with_bytes(pool, descriptor.file, set())
    return pool


def _add_with_bytes(pool: descriptor_pool.DescriptorPool, file: Any, added: set[str]) -> None:
    if file.name in added:
        return
    added.add(file.name)
    for dependency in file.dependencies:
        _add_with_bytes(pool, dependency, added)
    proto = descriptor_pb2.FileDescriptorProto()
    file.CopyToProto(proto)
    for message in proto.message_type:
        _strings_to_bytes(message)
    pool.Add(proto)


def _strings_to_bytes(message: descriptor_pb2.DescriptorProto) -> None:
    if not message.options.map_entry:
        for field in message.field:
            if field.type == descriptor_pb2.FieldDescriptorProto.TYPE_STRING:
                field.type = descriptor_pb2.FieldDescriptorProto.TYPE_BYTES
    for nested in message.nested_type:
        _strings_to_bytes(nested)


def _first_invalid(message: Message, original: Descriptor, prefix: str) -> str | None:
    for field, value in message.ListFields():
        declared = original.fields_by_name[field.name]
        for index, item in enumerate(value if field.is_repeated else [value]):
            path = f"{prefix}{field.name}" + (f"[{index}]" if field.is_repeated else "")
            if declared.type == FieldDescriptor.TYPE_STRING and not _is_utf8(item):
                return path
            nested = declared.message_type
            if nested is not None and not nested.GetOptions().map_entry:
                found = _first_invalid(item, nested, f"{path}.")
                if found is not None:
                    return found
    return None


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


async def _refuse(malformed: Malformed, context: Context) -> None:
    error = malformed.error
    await context.abort(calls.status_code(error), str(error), calls.trailing_metadata(error))


def _checked(behaviour: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def checked(request: Any, context: Context) -> Any:
        try:
            if isinstance(request, Malformed):
                await _refuse(request, context)
            return await behaviour(request, context)
        except grpc.aio.AbortError as aborted:
            raise calls.without_frames(aborted) from None
        finally:
            del request, context

    return checked


def _checked_stream(behaviour: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
    async def checked(request: Any, context: Context) -> AsyncIterator[Any]:
        try:
            if isinstance(request, Malformed):
                await _refuse(request, context)
            async for response in behaviour(request, context):
                yield response
        except grpc.aio.AbortError as aborted:
            raise calls.without_frames(aborted) from None
        finally:
            del request, context

    return checked
