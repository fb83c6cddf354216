"""Certificates of a router's door: read at its start, and again whenever one of their files has changed.

gRPC asks at each handshake what has changed. Files that cannot be used change nothing: the certificate stays the one
that was read last, and the log says so.
"""

import logging
from pathlib import Path
from typing import Any

import grpc

from cluster_configs.schema import SecuritySection
from cluster_core.errors import ConfigError

logger = logging.getLogger(__name__)

# Of each file what tells that it has changed.
_Stamps = tuple[tuple[int, int, int], ...]


class Certificates:
    """Of a router. section: has a certificate. Raises ConfigError."""

    def __init__(self, section: SecuritySection) -> None:
        assert section.certificate_file is not None and section.certificate_key_file is not None, "it is configured"
        self._chain = Path(section.certificate_file)
        self._key = Path(section.certificate_key_file)
        self._clients = Path(section.client_ca_file) if section.client_ca_file is not None else None
        try:
            self._stamps, self._read_last = self._stamped(), self._read()
        except (OSError, ValueError) as error:
            raise ConfigError(_sentence(error), field="security.certificate_file") from None
        # Said once for each state of the files.
        self._complained: _Stamps | None = None

    def credentials(self) -> grpc.ServerCredentials:
        needs_certificate = self._clients is not None
        changed: Any = self.changed
        return grpc.dynamic_ssl_server_credentials(self._read_last, changed, needs_certificate)

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """What is in force from now on; None: nothing has changed. Called by gRPC, on a thread of its own."""
        stamps: _Stamps = ()
        try:
            stamps = self._stamped()
            if stamps == self._stamps:
                return None
            read = self._read()
        except (OSError, ValueError) as error:
            if stamps != self._complained:
                logger.error("the certificate stays as it is: %s", _sentence(error))
            self._complained = stamps
            return None
        self._stamps, self._read_last = stamps, read
        logger.warning("the certificate is as %s says now", self._chain)
        return read

    def _read(self) -> grpc.ServerCertificateConfiguration:
        """Raises OSError, ValueError for what is no certificate with its key."""
        chain, key = self._chain.read_bytes(), self._key.read_bytes()
        check_pair(chain, key)
        clients = self._clients.read_bytes() if self._clients is not None else None
        return grpc.ssl_server_certificate_configuration([(key, chain)], clients)

    def _stamped(self) -> _Stamps:
        files = [path for path in (self._chain, self._key, self._clients) if path is not None]
        return tuple((found.st_ino, found.st_size, found.st_mtime_ns) for found in (path.stat() for path in files))


def check_pair(chain: bytes, key: bytes) -> None:
    """Raises ValueError where they are none, or not of each other: gRPC would refuse every handshake without a word."""
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
    from cryptography.x509 import load_pem_x509_certificates

    public = load_pem_private_key(key, None).public_key()
    if load_pem_x509_certificates(chain)[0].public_key() != public:
        raise ValueError("the key is not that of the certificate")


def _sentence(error: OSError | ValueError) -> str:
    if isinstance(error, OSError):
        return f"{error.filename} cannot be read: {error.strerror}"
    return f"security.certificate_file and security.certificate_key_file do not go together: {error}"
