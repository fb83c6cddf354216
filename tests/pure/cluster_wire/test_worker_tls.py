"""Certificates of workers: the same authority for all who have the secret, and good whatever a host's clock says."""

import hashlib
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

from cluster_wire.secret import Secret
from cluster_wire.worker_tls import WORKER_NAME, authority_of, worker_certificate

SECRET, OTHER = Secret(b"a" * 32), Secret(b"b" * 32)


def read(pem: bytes) -> x509.Certificate:
    return x509.load_pem_x509_certificate(pem)


def test_an_authority_is_the_same_bytes_on_each_host_and_with_each_release() -> None:
    """Hosts may have another version of what encodes it: who changes this has routers refuse the workers of before."""
    assert authority_of(SECRET) == authority_of(Secret(b"a" * 32))
    digest = hashlib.sha256(authority_of(SECRET)).hexdigest()
    assert digest == "8f989c9df53be1d1b03de5618196e7bb3bb20ba91e8a8e9d7d5f40433eaeb149"


def test_another_secret_is_another_authority_which_signs_nothing_for_this_one() -> None:
    assert authority_of(SECRET) != authority_of(OTHER)
    _, chain = worker_certificate(SECRET)
    read(chain).verify_directly_issued_by(read(authority_of(SECRET)))
    with pytest.raises(InvalidSignature):
        read(chain).verify_directly_issued_by(read(authority_of(OTHER)))


def test_each_worker_has_a_key_of_its_own() -> None:
    (one, certified), (other, _) = worker_certificate(SECRET), worker_certificate(SECRET)
    assert one != other
    assert load_pem_private_key(one, None).public_key() == read(certified).public_key()


@pytest.mark.parametrize("now", [datetime(2020, 1, 1, tzinfo=UTC), datetime.now(UTC), datetime(2400, 1, 1, tzinfo=UTC)])
def test_a_certificate_is_good_whatever_a_clock_says(now: datetime) -> None:
    _, chain = worker_certificate(SECRET)
    for each in (read(chain), read(authority_of(SECRET))):
        assert each.not_valid_before_utc + timedelta(days=1) < now < each.not_valid_after_utc - timedelta(days=1)


def test_a_worker_cannot_sign_for_others() -> None:
    _, chain = worker_certificate(SECRET)
    assert not read(chain).extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    names = read(chain).extensions.get_extension_for_class(x509.SubjectAlternativeName)
    assert names.critical and names.value.get_values_for_type(x509.DNSName) == [WORKER_NAME]


def test_nothing_of_the_secret_or_of_the_workers_key_is_in_what_is_shown() -> None:
    key, chain = worker_certificate(SECRET)
    own = load_pem_private_key(key, None)
    assert isinstance(own, EllipticCurvePrivateKey)
    private = own.private_numbers().private_value.to_bytes(32, "big")
    for shown in (chain, authority_of(SECRET)):
        for kept in (SECRET.worker_authority_key, SECRET.service_key.encode(), private):
            assert kept not in read(shown).public_bytes(Encoding.DER)
