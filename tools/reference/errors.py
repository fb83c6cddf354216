"""`docs/reference/errors.md`: every error, from the tree of errors and the tables of statuses."""

from collections.abc import Iterator

import grpc
from rachis import errors as client

from cluster_core.errors import ClientFault, OperatingFault, RachisError
from cluster_wire.http_status import http_status
from tools.reference.table import WRITTEN, code, prose, table

_INTRODUCTION = """\
What happens when, with the limits at fault: [errors](../using.md#errors), and of sessions
[what is refused](../streaming.md#what-is-refused). Every error has a sentence, and bad input names the field. A time to
try again comes as `google.rpc.RetryInfo` and as the trailing metadata `retry-after-ms`; over HTTP as `Retry-After`.
"""


def page() -> str:
    client_kinds = {kind.CODE.name: kind.__name__ for kind in client.RachisError.__subclasses__()}
    statuses = sorted({kind.status for kind in below(RachisError)})
    parts = [
        "# Errors\n",
        WRITTEN.format(source="[errors.py](../../cluster_core/errors.py)"),
        _INTRODUCTION,
        "## What a caller gets\n",
        table(
            ("gRPC status", "number", "HTTP status", "in Python: `rachis.`"),
            (
                (
                    code(status),
                    str(grpc.StatusCode[status].value[0]),
                    f"{http_status(status).value} {http_status(status).phrase}",
                    code(client_kinds.get(status, "RachisError")),
                )
                for status in statuses
            ),
        ),
        "Over HTTP a model that is not served is 404, before a router is asked.\n",
        "## Where it comes from\n",
        "A fault of the caller can never work as it is asked. What happens to a cluster is mostly worth another try.\n",
        table(
            ("error", "gRPC status", "whose fault", "what"),
            ((code(kind.__name__), code(kind.status), _whose(kind), prose(_said(kind))) for kind in below(RachisError)),
        ),
    ]
    return "\n".join(parts)


def below(kind: type[RachisError]) -> Iterator[type[RachisError]]:
    """All errors that are raised; the two branches of the tree, which nobody raises, aside."""
    for each in kind.__subclasses__():
        if each.__module__ != RachisError.__module__:
            continue
        if each not in (ClientFault, OperatingFault):
            yield each
        yield from below(each)


def _whose(kind: type[RachisError]) -> str:
    if issubclass(kind, ClientFault):
        return "the caller's"
    return "the cluster's" if issubclass(kind, OperatingFault) else "nobody's"


def _said(kind: type[RachisError]) -> str:
    return (kind.__doc__ or "").strip()
