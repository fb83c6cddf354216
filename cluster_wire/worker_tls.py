"""How calls to workers are encrypted: by certificates of an authority that whoever has the service's secret can make.

authority   its key is derived from the secret, and its certificate is the same bytes wherever it is made (Ed25519, RFC
            8032, signs alike each time); nobody writes it down, and routers trust it alone
worker      has a key of its own (P-256, which every TLS knows) for as long as its process lives, and shows a
            certificate of the authority for one name that all workers have: where they are is the registry's to say

Nothing ends but the secret: certificates are good on every date that a host may believe in. A router brings its key to
nobody who has not shown such a certificate, since no call is sent before hands are shaken. Without a secret calls are
not encrypted.
"""

import datetime
from collections.abc import Callable, Sequence
from typing import Any

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from cluster_wire.secret import Secret

WORKER_NAME = "worker.rachis.internal"
_AUTHORITY = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "workers of a Rachis service")])
# The last one is what RFC 5280 (4.1.2.5) has for a certificate without an end.
_FROM, _UNTIL = datetime.datetime(2000, 1, 1), datetime.datetime(9999, 12, 31, 23, 59, 59)
_SERVER_NAME = ("grpc.ssl_target_name_override", WORKER_NAME)

MakeChannel = Callable[..., grpc.aio.Channel]


def worker_channel(secret: Secret | None) -> MakeChannel:
    """What makes a channel to a worker, from its address and `options`."""
    if secret is None:
        return grpc.aio.insecure_channel
    credentials = grpc.ssl_channel_credentials(authority_of(secret))

    def encrypted(address: str, options: Sequence[tuple[str, Any]] = ()) -> grpc.aio.Channel:
        return grpc.aio.secure_channel(address, credentials, [*options, _SERVER_NAME])

    return encrypted


def add_worker_port(server: grpc.aio.Server, address: str, secret: Secret | None) -> int:
    """Has a worker's server listen there, and returns its port. Raises RuntimeError where it cannot."""
    if secret is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, grpc.ssl_server_credentials([worker_certificate(secret)]))


def authority_of(secret: Secret) -> bytes:
    """Its certificate, PEM."""
    return _authority(_authority_key(secret)).public_bytes(Encoding.PEM)


def worker_certificate(secret: Secret) -> tuple[bytes, bytes]:
    """(key, certificate), PEM, of one worker: both are new each time."""
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        _builder(x509.Name([]), key.public_key(), x509.random_serial_number())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        # Its subject is empty, so that the name here has to be looked at.
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(WORKER_NAME)]), critical=True)
        .sign(_authority_key(secret), None)
    )
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return private, certificate.public_bytes(Encoding.PEM)


def _authority(key: Ed25519PrivateKey) -> x509.Certificate:
    return (
        _builder(_AUTHORITY, key.public_key(), serial=1)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, None)
    )


def _authority_key(secret: Secret) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(secret.worker_authority_key)


def _builder(subject: x509.Name, key: CertificatePublicKeyTypes, serial: int) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .issuer_name(_AUTHORITY)
        .subject_name(subject)
        .public_key(key)
        .serial_number(serial)
        .not_valid_before(_FROM)
        .not_valid_after(_UNTIL)
    )
