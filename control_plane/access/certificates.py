"""Certificates of a router's doors: read at its start, and again whenever one of their files has changed.

What has changed is looked at in each handshake. Files that cannot be used change nothing: the certificate stays the one
that was read last, and the log says so.
"""

import logging
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import grpc

from cluster_configs.schema import SecuritySection
from cluster_core.errors import ConfigError

logger = logging.getLogger(__name__)

T = TypeVar("T")
# Of each file what tells that it has changed.
_Stamps = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """PEM. clients: authorities of certificates that clients have to show."""

    chain: Path
    key: Path
    clients: Path | None


class Certificates(Generic[T]):
    """Of a router. section: has a certificate. make: what a door needs of files whose certificate and key go together;
    raises OSError, ValueError. Raises ConfigError."""

    def __init__(self, section: SecuritySection, make: Callable[[CertificateFiles], T]) -> None:
        assert section.certificate_file is not None and section.certificate_key_file is not None, "it is configured"
        clients = Path(section.client_ca_file) if section.client_ca_file is not None else None
        self._files = CertificateFiles(Path(section.certificate_file), Path(section.certificate_key_file), clients)
        self._make = make
        try:
            self._stamps, self._read_last = self._stamped(), self._read()
        except (OSError, ValueError) as error:
            raise ConfigError(_sentence(error), field="security.certificate_file") from None
        # Said once for each state of the files.
        self._complained: _Stamps | None = None

    def current(self) -> T:
        """What is in force. One thread asks, or gRPC by `changed`."""
        self.changed()
        return self._read_last

    def changed(self) -> T | None:
        """What is in force from now on; None: nothing has changed."""
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
        logger.warning("the certificate is as %s says now", self._files.chain)
        return read

    def _read(self) -> T:
        """Raises OSError, ValueError for what is no certificate with its key."""
        check_pair(self._files.chain.read_bytes(), self._files.key.read_bytes())
        return self._make(self._files)

    def _stamped(self) -> _Stamps:
        files = [path for path in (self._files.chain, self._files.key, self._files.clients) if path is not None]
        return tuple((found.st_ino, found.st_size, found.st_mtime_ns) for found in (path.stat() for path in files))


def grpc_credentials(section: SecuritySection) -> grpc.ServerCredentials:
    """Of a door of gRPC, which asks on a thread of its own. Raises ConfigError."""
    certificates = Certificates(section, _of_grpc)
    changed: Any = certificates.changed
    return grpc.dynamic_ssl_server_credentials(certificates.current(), changed, section.client_ca_file is not None)


def page_context(files: CertificateFiles) -> ssl.SSLContext:
    """Of a router's own HTTP port, where clients may show a certificate and need none: a probe has none."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files.chain, files.key)
    if files.clients is not None:
        context.load_verify_locations(files.clients)
        context.verify_mode = ssl.CERT_OPTIONAL
    return context


def _of_grpc(files: CertificateFiles) -> grpc.ServerCertificateConfiguration:
    clients = files.clients.read_bytes() if files.clients is not None else None
    return grpc.ssl_server_certificate_configuration([(files.key.read_bytes(), files.chain.read_bytes())], clients)


def check_pair(chain: bytes, key: bytes) -> None:
    """Raises ValueError where they are none, or not of each other: gRPC would refuse every handshake without a word."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
    from cryptography.x509 import load_pem_x509_certificates

    try:
        public = load_pem_private_key(key, None).public_key()
        certified = load_pem_x509_certificates(chain)[0].public_key()
    except (TypeError, UnsupportedAlgorithm) as error:
        # A key that asks for a password is a TypeError.
        raise ValueError(str(error)) from None
    if certified != public:
        raise ValueError("the key is not that of the certificate")


def _sentence(error: OSError | ValueError) -> str:
    if isinstance(error, OSError):
        return f"{error.filename} cannot be read: {error.strerror}"
    return f"security.certificate_file and security.certificate_key_file do not go together: {error}"
