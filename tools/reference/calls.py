"""`docs/reference/grpc.md`: services, messages and enumerations, from the protos and their comments."""

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import grpc_tools
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)
from grpc_tools import protoc

from tools.reference.table import WRITTEN, code, prose, table

PROTOS = Path(__file__).resolve().parent.parent.parent / "protos"
# What clients and operators call first; what only the parts of a service say to each other comes last.
FILES = ("rachis/v1/router.proto", "rachis/v1/generation.proto", "rachis/v1/admin.proto", "rachis/v1/worker.proto")

_INTRODUCTION = """\
How to call them: [using](../using.md), [streaming](../streaming.md). Who may: [access](../access.md). A field that
a caller leaves out has the default of its type, unless its comment says otherwise. `WorkerService` is internal.
"""
_PLAIN = {
    number: name.removeprefix("TYPE_").lower()
    for name, number in FieldDescriptorProto.Type.items()
    if name not in ("TYPE_MESSAGE", "TYPE_ENUM")
}
# Numbers of `FileDescriptorProto` and of what is in it, of which paths of comments are made.
_MESSAGE, _ENUM, _SERVICE = 4, 5, 6
_FIELD, _NESTED, _NESTED_ENUM = 2, 3, 4

Place = tuple[int, ...]
Comments = Mapping[Place, str]


def page() -> str:
    parts = ["# gRPC\n", WRITTEN.format(source="[the protos](../../protos/rachis/v1)"), _INTRODUCTION]
    for file in described():
        comments = comments_of(file)
        parts.append(f"## {file.name.rpartition('/')[2]}\n")
        parts += [_service(service, (_SERVICE, at), comments) for at, service in enumerate(file.service)]
        for at, message in enumerate(file.message_type):
            parts += _message("", message, (_MESSAGE, at), comments)
        parts += [_enum("", each, (_ENUM, at), comments) for at, each in enumerate(file.enum_type)]
    return "\n".join(parts)


def described() -> list[FileDescriptorProto]:
    """The protos with their comments, in the order of `FILES`."""
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    with tempfile.NamedTemporaryFile() as out:
        options = [f"-I{PROTOS}", f"-I{well_known}", "--include_source_info", f"--descriptor_set_out={out.name}"]
        if protoc.main(["protoc", *options, *FILES]) != 0:
            raise SystemExit("protoc failed")
        found = FileDescriptorSet.FromString(Path(out.name).read_bytes())
    by_name = {file.name: file for file in found.file}
    return [by_name[name] for name in FILES]


def comments_of(file: FileDescriptorProto) -> Comments:
    """What stands before each thing, without what is meant for the linter."""
    return {
        tuple(location.path): " ".join(
            line.strip() for line in location.leading_comments.splitlines() if "buf:lint" not in line
        )
        for location in file.source_code_info.location
    }


def _service(service: ServiceDescriptorProto, path: Place, comments: Comments) -> str:
    rows = []
    for at, rpc in enumerate(service.method):
        asked = f"{'stream of ' if rpc.client_streaming else ''}{_link(rpc.input_type)}"
        told = f"{'stream of ' if rpc.server_streaming else ''}{_link(rpc.output_type)}"
        rows.append((code(rpc.name), asked, told, prose(comments.get((*path, _FIELD, at), ""))))
    return f"### {service.name}\n\n{_said(path, comments)}{table(('call', 'request', 'answer', 'what'), rows)}"


def _message(within: str, message: DescriptorProto, path: Place, comments: Comments) -> Iterator[str]:
    name = f"{within}{message.name}"
    entries = {f".rachis.v1.{name}.{each.name}": each for each in message.nested_type if each.options.map_entry}
    rows = []
    for at, field in enumerate(message.field):
        said = _of_choice(message, field) + comments.get((*path, _FIELD, at), "")
        rows.append((code(field.name), _type(field, entries), prose(said)))
    fields = table(("field", "type", "what"), rows) if rows else "No fields.\n"
    yield f"### {name}\n\n{_said(path, comments)}{fields}"
    for at, nested in enumerate(message.nested_type):
        if not nested.options.map_entry:
            yield from _message(f"{name}.", nested, (*path, _NESTED, at), comments)
    for at, each in enumerate(message.enum_type):
        yield _enum(f"{name}.", each, (*path, _NESTED_ENUM, at), comments)


def _enum(within: str, enum: EnumDescriptorProto, path: Place, comments: Comments) -> str:
    rows = [
        (code(value.name), str(value.number), prose(comments.get((*path, _FIELD, at), "")))
        for at, value in enumerate(enum.value)
    ]
    return f"### {within}{enum.name}\n\n{_said(path, comments)}{table(('value', 'number', 'what'), rows)}"


def _said(path: Place, comments: Comments) -> str:
    said = comments.get(path, "")
    return f"{prose(said)}\n\n" if said else ""


def _of_choice(message: DescriptorProto, field: FieldDescriptorProto) -> str:
    """Fields of which one alone may be set say so."""
    if not field.HasField("oneof_index") or field.proto3_optional:
        return ""
    return f"One of `{message.oneof_decl[field.oneof_index].name}`. "


def _type(field: FieldDescriptorProto, entries: Mapping[str, DescriptorProto]) -> str:
    if field.type_name in entries:
        key, value = entries[field.type_name].field
        return f"map from {_type(key, {})} to {_type(value, {})}"
    kind = _PLAIN[field.type] if field.type in _PLAIN else _link(field.type_name)
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"list of {kind}"
    return f"optional {kind}" if field.proto3_optional else kind


def _link(full_name: str) -> str:
    name = full_name.removeprefix(".rachis.v1.")
    return f"[{name}](#{name.replace('.', '').lower()})"
