"""The HTTP status of each gRPC status that a router answers with, as one literal table."""

from http import HTTPStatus

# What the client sent can never work.
BAD_INPUT = frozenset({"INVALID_ARGUMENT", "OUT_OF_RANGE", "FAILED_PRECONDITION", "UNIMPLEMENTED"})
# Who asks is not known, or may not do this.
OF_ACCESS = {"UNAUTHENTICATED": HTTPStatus.UNAUTHORIZED, "PERMISSION_DENIED": HTTPStatus.FORBIDDEN}
UNKNOWN = {"NOT_FOUND": HTTPStatus.NOT_FOUND}
# Worth another try.
OF_CLUSTER = {
    "RESOURCE_EXHAUSTED": HTTPStatus.TOO_MANY_REQUESTS,
    "UNAVAILABLE": HTTPStatus.SERVICE_UNAVAILABLE,
    "CANCELLED": HTTPStatus.SERVICE_UNAVAILABLE,
    "DEADLINE_EXCEEDED": HTTPStatus.GATEWAY_TIMEOUT,
}


def http_status(status: str) -> HTTPStatus:
    """status: name of the gRPC status. Whatever is in no table is a failure of the service."""
    if status in BAD_INPUT:
        return HTTPStatus.BAD_REQUEST
    return {**OF_ACCESS, **UNKNOWN, **OF_CLUSTER}.get(status, HTTPStatus.INTERNAL_SERVER_ERROR)
