"""Errors of a command as one sentence on standard error, and the exit codes of the command line."""

import sys

import grpc
from rachis.client import KEY_VARIABLE
from rich.markup import escape

from cluster_core.errors import ClientFault, RachisError
from command_line.output import err, print_json

OPERATING_EXIT_CODE = 1
USAGE_EXIT_CODE = 2
INTERRUPTED_EXIT_CODE = 130
_CLIENT_CODES = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
)


def report_error(error: RachisError | grpc.aio.AioRpcError) -> int:
    """Prints the error, with `--json` also as an object, and returns the exit code."""
    if isinstance(error, RachisError):
        status, message, is_users = error.status, str(error), isinstance(error, ClientFault)
        sentence = message
    else:
        status, message, is_users = error.code().name, error.details() or "", error.code() in _CLIENT_CODES
        sentence = f"{status}: {message}"
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            sentence += f"; commands bring the one in {KEY_VARIABLE}"
    err.print("[bold red]error[/bold red]", escape(sentence))
    if "--json" in sys.argv:
        print_json({"error": message, "status": status})
    return USAGE_EXIT_CODE if is_users else OPERATING_EXIT_CODE


def first_leaf(group: BaseExceptionGroup[BaseException]) -> BaseException:
    first = group.exceptions[0]
    return first_leaf(first) if isinstance(first, BaseExceptionGroup) else first
