"""The service's secret, and what is derived from it: salts of tenants, and keys by which its parts know each other.

HMAC-SHA-256 (RFC 2104) over a purpose and its parts, each with its length in front, so that no two sets of parts meet.
Who reads Redis, metrics or an index cannot test a guess at a prompt without it: names of chunks go on from the salt.
"""

import base64
import binascii
import hashlib
import hmac
import os
import secrets
from pathlib import Path
from typing import Literal

from cluster_core.errors import ConfigError

Sharing = Literal["never", "always"]

SEAL_BYTES = 32
_BYTES = 32
_FIELD = "security.secret_file"


class Secret:
    def __init__(self, key: bytes) -> None:
        self._key = key

    def __repr__(self) -> str:
        return "Secret(***)"

    def salt(self, tenant: str, cache_salt: str, sharing: Sharing) -> str:
        """That a request's KV is kept under: 64 hexadecimal digits. cache_salt: the client's own, which refines it."""
        return self._derived("salt", tenant if sharing == "never" else "", cache_salt).hex()

    def tenant_id(self, tenant: str) -> str:
        """16 hexadecimal digits by which workers tell tenants apart."""
        return self._derived("tenant", tenant).hex()[:16]

    @property
    def service_key(self) -> str:
        """By which processes of the service show that they have the secret."""
        return f"rs-{self._derived('service key').hex()}"

    def seal(self, data: bytes) -> bytes:
        """SEAL_BYTES that nobody else can make for the data."""
        return hmac.new(self._derived("seal"), data, hashlib.sha256).digest()

    @property
    def side_channel_key(self) -> bytes:
        """32 bytes, private, of the side channel by which workers tell each other where their KV lies."""
        return self._derived("side channel")

    @property
    def worker_authority_key(self) -> bytes:
        """32 bytes, private, of the authority of the certificates that workers show to routers."""
        return self._derived("worker authority")

    @property
    def fingerprint(self) -> str:
        """Tells whether two hosts have the same one, and nothing else of it."""
        return self._derived("fingerprint").hex()[:16]

    def _derived(self, purpose: str, *parts: str) -> bytes:
        encoded = [part.encode() for part in (purpose, *parts)]
        message = b"".join(len(part).to_bytes(4, "big") + part for part in encoded)
        return hmac.new(self._key, message, hashlib.sha256).digest()


def write_secret(path: Path) -> None:
    """A new one, for its owner alone. Raises ConfigError, and leaves one that is there as it is."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ConfigError(
            f"{path} is there already; with another secret nothing that is cached would be found", field=_FIELD
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}", field=_FIELD) from None
    with os.fdopen(handle, "wb") as file:
        file.write(base64.b64encode(secrets.token_bytes(_BYTES)) + b"\n")


def read_secret(path: Path) -> Secret:
    """Raises ConfigError."""
    try:
        key = base64.b64decode(path.read_bytes().strip(), validate=True)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", field=_FIELD) from None
    except binascii.Error:
        key = b""
    if len(key) < _BYTES:
        raise ConfigError(
            f"{path} must have {_BYTES} bytes or more as base64; `rachis keys secret` makes one", field=_FIELD
        )
    return Secret(key)


def fingerprint_of(path: str | None) -> str:
    """Of the secret in a file; empty without one. Raises ConfigError."""
    return read_secret(Path(path)).fingerprint if path is not None else ""
