"""By which names in a certificate somebody is known, and which certificates are nobody's."""

import datetime
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtensionOID, NameOID

from benchmarks.certificates import Authority
from cluster_core.clock import unix_s
from cluster_core.errors import ConfigError
from control_plane.access import api_keys
from control_plane.access.api_keys import ApiKey, new_certificate, rotated
from control_plane.access.client_certificates import ClientCertificates, read_names
from control_plane.access.roles import Identity, Role

DAY_S = 86_400.0


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


def known_by(certificate: str, name: str = "chat", **more: Any) -> ApiKey:
    limits = {"lowest_priority": -2, "now_s": 0.0, "expires_s": None, **more}
    return new_certificate(name, "acme", [Role.GENERATE], certificate, **limits)


class World:
    def __init__(self, *keys: ApiKey, own: frozenset[str] = frozenset()) -> None:
        self.keys: Mapping[str, ApiKey] = {key.key_id: key for key in keys}
        self.now_s = unix_s()
        self.certificates = ClientCertificates(lambda: self.keys, lambda: own, most_read=2, time_s=lambda: self.now_s)

    def who(self, chain: Path) -> str:
        found = self.certificates.identity(chain.read_bytes())
        return found.name if found is not None else "nobody"


@pytest.mark.parametrize(
    ("certificate", "hosts"),
    [
        ("uri:spiffe://acme/chat", ["spiffe://acme/chat"]),
        ("uri:spiffe://acme/chat", ["10.0.0.1", "x.example", "spiffe://acme/chat"]),
        ("dns:chat.example", ["chat.example"]),
        ("cn:client", ["10.0.0.1"]),
    ],
)
def test_a_name_of_the_file_is_found_in_the_certificate(
    authority: Authority, certificate: str, hosts: list[str]
) -> None:
    chain, _ = authority.sign("client", *hosts)
    identity = World(known_by(certificate)).certificates.identity(chain.read_bytes())
    assert identity is not None
    assert identity == Identity("chat", "acme", frozenset({Role.GENERATE}), -2)


@pytest.mark.parametrize(
    "certificate",
    [
        "uri:spiffe://acme/cha",
        "uri:spiffe://acme/chat/more",
        "uri:spiffe://ACME/chat",
        "dns:example",
        "dns:b.chat.example",
        "cn:chat.example",
        "dns:client",
        "cn:clien",
    ],
)
def test_a_part_of_a_name_or_one_of_another_kind_is_nobody(authority: Authority, certificate: str) -> None:
    chain, _ = authority.sign("client", "spiffe://acme/chat", "chat.example")
    assert World(known_by(certificate)).who(chain) == "nobody"


def test_who_fits_two_entries_is_nobody(authority: Authority) -> None:
    chain, _ = authority.sign("client", "spiffe://acme/chat", "chat.example")
    both = (known_by("uri:spiffe://acme/chat", "one"), known_by("dns:chat.example", "two"))
    assert [World(each).who(chain) for each in both] == ["one", "two"]
    assert World(*both).who(chain) == "nobody"


def test_the_services_own_certificate_is_nobodys(authority: Authority) -> None:
    own, _ = authority.sign("router", "router.example", "127.0.0.1")
    renewed, _ = authority.sign("router", "router.example", "10.0.0.1")
    world = World(known_by("cn:router"), known_by("dns:router.example", "two"), own=read_names(own))
    assert (world.who(own), world.who(renewed)) == ("nobody", "nobody")


def test_a_certificate_is_good_from_its_beginning_to_its_end(authority: Authority) -> None:
    chain, _ = authority.sign("client", days=1.0)
    world = World(known_by("cn:client"))
    assert world.who(chain) == "chat"
    world.now_s += DAY_S + 60
    assert world.who(chain) == "nobody", "on a connection that was opened before"
    world.now_s -= 4 * DAY_S
    assert world.who(chain) == "nobody", "nor before it begins"


def test_an_entry_that_ends_or_is_revoked_ends_its_certificate(authority: Authority) -> None:
    chain, _ = authority.sign("client")
    world = World(known_by("cn:client", expires_s=unix_s() + 10))
    assert world.who(chain) == "chat"
    world.now_s += 11
    assert world.who(chain) == "nobody"
    world.now_s -= 11
    world.keys = {}
    assert world.who(chain) == "nobody"


def test_what_is_no_certificate_is_nobodys_and_few_are_remembered(authority: Authority) -> None:
    world = World(known_by("cn:client"))
    for pem in (b"", b"\xff\x00", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"):
        assert world.certificates.identity(pem) is None
    chain, _ = authority.sign("client")
    assert world.who(chain) == "chat"


@pytest.mark.parametrize(
    "certificate", ["", "chat", "uri:", "dns:Chat.example", "cn:", "ip:10.0.0.1", "uri:a b", "cn:" + "x" * 65]
)
def test_what_is_no_name_of_a_certificate_is_refused(certificate: str) -> None:
    with pytest.raises(ConfigError, match="must be a name in certificates") as raised:
        known_by(certificate)
    assert raised.value.field == "certificate"


def test_an_entry_is_written_and_read_and_has_nothing_to_rotate() -> None:
    key = known_by("uri:spiffe://acme/chat")
    assert api_keys.read(api_keys.written({key.key_id: key})) == {key.key_id: key}
    with pytest.raises(ConfigError, match="known by a certificate, which its authority renews"):
        rotated(key, now_s=0.0, grace_s=0.0)


def test_a_file_has_each_certificate_once_and_well_formed() -> None:
    one, two = known_by("cn:a", "one"), known_by("cn:a", "two")
    with pytest.raises(ConfigError, match="has the same certificate twice"):
        api_keys.read(api_keys.written({one.key_id: one, two.key_id: two}))
    with pytest.raises(ConfigError, match="is no file of keys"):
        api_keys.read(api_keys.written({one.key_id: one}).replace("cn:a", "ip:a"))


# A name that is an X.400 address, and one that is a party of EDI; each empty.
@pytest.mark.parametrize("names", ["3002a300", "3002a500"])
def test_a_certificate_with_names_that_nobody_reads_is_nobody_s(tmp_path: Path, names: str) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "client")])
    alternatives = x509.UnrecognizedExtension(ExtensionOID.SUBJECT_ALTERNATIVE_NAME, bytes.fromhex(names))
    now = datetime.datetime.fromtimestamp(unix_s(), datetime.UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), 5, now, now + datetime.timedelta(days=1))
    certificate = builder.add_extension(alternatives, critical=False).sign(key, hashes.SHA256())
    file = tmp_path / "tls.crt"
    file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    assert World(known_by("cn:client")).who(file) == "nobody"
    with pytest.raises(ConfigError, match="is no certificate"):
        read_names(file)


def test_a_file_that_is_no_certificate_is_named(tmp_path: Path) -> None:
    file = tmp_path / "tls.crt"
    file.write_text("no PEM")
    with pytest.raises(ConfigError, match="is no certificate") as raised:
        read_names(file)
    assert raised.value.field == "security.certificate_file"
