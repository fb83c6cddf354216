"""Messages of the admin API as JSON and back, by protobuf's own mapping with the names of the fields as they are. Pure.

Integers of 64 bits are strings there, since JavaScript's numbers do not hold them.
"""

import json
from typing import Any

from google.protobuf.descriptor_pool import Default
from google.protobuf.json_format import MessageToDict, ParseDict, ParseError
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from cluster_core.errors import InvalidInputError
from control_plane.console.admin_calls import METHODS

_DEEPEST = 8


def request_of(name: str, body: bytes) -> Message:
    """name: in `METHODS`. An empty body is a message without any field. Raises InvalidInputError."""
    message = GetMessageClass(_method(name).input_type)()
    try:
        fields = json.loads(body.strip() or b"{}")
        if not isinstance(fields, dict):
            raise ParseError("an object is needed")
        return ParseDict(fields, message, max_recursion_depth=_DEEPEST)
    except (ParseError, ValueError, RecursionError) as error:
        raise InvalidInputError(f"is no {message.DESCRIPTOR.name} in JSON: {error}"[:400], field="body") from None


def json_of(message: Message) -> str:
    """One line."""
    told = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return json.dumps(told, separators=(",", ":"))


def error_json(status: str, sentence: str) -> str:
    return json.dumps({"error": {"status": status, "message": sentence}})


def is_streamed(name: str) -> bool:
    return bool(_method(name).server_streaming)


def _method(name: str) -> Any:
    service, _, method = METHODS[name].lstrip("/").rpartition("/")
    return Default().FindServiceByName(service).methods_by_name[method]
