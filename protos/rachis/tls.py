"""TLS as a client's environment asks for it, where the client itself is not given credentials.

RACHIS_CA_FILE                  PEM of who has signed the routers' certificates; `system`: those of this host
RACHIS_CERTIFICATE_FILE         PEM of the client's own certificate, where routers ask for one
RACHIS_CERTIFICATE_KEY_FILE     and its key
RACHIS_SERVER_NAME              the name in the routers' certificates, where they are called by another
"""

from collections.abc import Mapping
from pathlib import Path

import grpc

from rachis.errors import InvalidInputError

CA_VARIABLE = "RACHIS_CA_FILE"
CERTIFICATE_VARIABLE = "RACHIS_CERTIFICATE_FILE"
KEY_VARIABLE = "RACHIS_CERTIFICATE_KEY_FILE"
SERVER_NAME_VARIABLE = "RACHIS_SERVER_NAME"
VARIABLES = frozenset({CA_VARIABLE, CERTIFICATE_VARIABLE, KEY_VARIABLE, SERVER_NAME_VARIABLE})
SYSTEM = "system"


def credentials_of(environment: Mapping[str, str]) -> grpc.ChannelCredentials | None:
    """None: nothing is encrypted. Raises InvalidInputError, naming the variable."""
    authority = environment.get(CA_VARIABLE, "")
    if not authority:
        for variable in (CERTIFICATE_VARIABLE, SERVER_NAME_VARIABLE):
            if environment.get(variable):
                raise InvalidInputError.local(f"needs {CA_VARIABLE}, without which nothing is encrypted", variable)
        return None
    return grpc.ssl_channel_credentials(
        None if authority == SYSTEM else read(authority, CA_VARIABLE),
        _optional(environment, KEY_VARIABLE),
        _optional(environment, CERTIFICATE_VARIABLE),
    )


def read(path: str, field: str) -> bytes:
    """Raises InvalidInputError."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidInputError.local(f"{path} cannot be read: {error.strerror}", field) from None


def _optional(environment: Mapping[str, str], variable: str) -> bytes | None:
    path = environment.get(variable)
    return read(path, variable) if path else None
