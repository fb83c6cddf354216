"""From the certificate of a connection to who calls: by a name in it, as the file of keys has it.

gRPC has verified the certificate when it gets here: that one of `security.client_ca_file` has signed it. A name is one
of these, compared as a whole; `certificate` of an entry in the file is one name.

    uri:spiffe://acme/chat   a URI among its subject's alternative names, as SPIFFE has it
    dns:chat.acme.example    a DNS name among them
    cn:chat                  the common name of its subject, where it has one

A certificate that two entries fit is nobody's. So is the service's own, which gateways show for whoever calls them.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.x509.oid import NameOID

from cluster_core.clock import unix_s
from cluster_core.errors import ConfigError
from control_plane.access.api_keys import ApiKey
from control_plane.access.key_digests import KeyDigests
from control_plane.access.roles import Identity

OWN_FIELD = "security.certificate_file"
# What cryptography raises for certificates that OpenSSL takes.
_NO_CERTIFICATE = (ValueError, x509.UnsupportedGeneralNameType, x509.DuplicateExtension, x509.InvalidVersion)


@dataclass(frozen=True, slots=True)
class _Shown:
    """What is read off a certificate. Times are Unix seconds."""

    names: frozenset[str]
    from_s: float
    until_s: float


class ClientCertificates:
    """Of one router. keys: those that there are now, by id; others are another mapping. own_names: of the service's own
    certificate. most_read: certificates that are remembered. time_s: Unix time."""

    def __init__(
        self,
        keys: Callable[[], Mapping[str, ApiKey]],
        own_names: Callable[[], frozenset[str]],
        *,
        most_read: int = 4096,
        time_s: Callable[[], float] = unix_s,
    ) -> None:
        self._keys = keys
        self._own_names = own_names
        self._most_read = most_read
        self._time_s = time_s
        self._digest = KeyDigests()
        self._read: OrderedDict[bytes, _Shown] = OrderedDict()
        # Those of the keys that have a certificate, by its name, and of which mapping.
        self._by_name: Mapping[str, ApiKey] = {}
        self._of: Mapping[str, ApiKey] = {}

    def is_own(self, pem: bytes) -> bool:
        """Whether it shares a name with the service's own, as that of a gateway does."""
        return bool(self._shown(pem).names & self._own_names())

    def identity(self, pem: bytes) -> Identity | None:
        """Whose certificate that is; None: nobody's."""
        shown, now_s = self._shown(pem), self._time_s()
        if not shown.from_s <= now_s < shown.until_s or shown.names & self._own_names():
            return None
        fitting = [key for key in map(self._named().get, shown.names) if key is not None]
        if len(fitting) != 1 or fitting[0].has_expired(now_s):
            return None
        return fitting[0].identity

    def _named(self) -> Mapping[str, ApiKey]:
        keys = self._keys()
        if keys is not self._of:
            self._of, self._by_name = keys, {key.certificate: key for key in keys.values() if key.certificate}
        return self._by_name

    def _shown(self, pem: bytes) -> _Shown:
        digest = self._digest(pem.decode("latin-1"))
        shown = self._read.get(digest)
        if shown is None:
            shown = self._read[digest] = _read(pem)
            while len(self._read) > self._most_read:
                self._read.popitem(last=False)
        return shown


def read_names(path: Path) -> frozenset[str]:
    """Of the first certificate in a file. Raises ConfigError, OSError."""
    try:
        return _names(x509.load_pem_x509_certificate(path.read_bytes()))
    except _NO_CERTIFICATE as error:
        raise ConfigError(f"{path} is no certificate: {error}", field=OWN_FIELD) from None


def _read(pem: bytes) -> _Shown:
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        names = _names(certificate)
    except _NO_CERTIFICATE:
        # OpenSSL takes what is stricter here: it is nobody's.
        return _Shown(frozenset(), 0.0, 0.0)
    return _Shown(names, certificate.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp())


def _names(certificate: x509.Certificate) -> frozenset[str]:
    """Raises one of `_NO_CERTIFICATE` for what is none of RFC 5280, or has names of kinds that cannot be read."""
    try:
        alternatives = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        alternatives = x509.SubjectAlternativeName([])
    common = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return frozenset(
        [
            *(f"uri:{name}" for name in alternatives.get_values_for_type(x509.UniformResourceIdentifier)),
            *(f"dns:{name.lower()}" for name in alternatives.get_values_for_type(x509.DNSName)),
            *(f"cn:{each.value!s}" for each in common if len(common) == 1),
        ]
    )
