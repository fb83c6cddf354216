"""Tokens of an issuer: which are good, whose they are, and the many ways in which one is not."""

import base64
import hashlib
import hmac
import json
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from cluster_core.clock import unix_s
from cluster_core.errors import ConfigError, OverloadedError
from control_plane.access.roles import Identity, Role
from control_plane.access.web_tokens import TokenRules, WebTokens, read_jwks

RULES = TokenRules("https://issuer", "rachis", "tenant", "roles")
ELLIPTIC, OTHER = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
RSA = rsa.generate_private_key(65537, 2048)
EDWARDS = ed25519.Ed25519PrivateKey.generate()
SIGNERS: dict[str, tuple[Any, str]] = {"e": (ELLIPTIC, "ES256"), "r": (RSA, "RS256"), "d": (EDWARDS, "EdDSA")}


def public(key_id: str) -> dict[str, Any]:
    key, algorithm = SIGNERS[key_id]
    made = jwt.get_algorithm_by_name(algorithm).to_jwk(key.public_key(), as_dict=True)
    return {**made, "kid": key_id, "alg": algorithm}


class World:
    def __init__(self, **limits: int) -> None:
        self.keys = {key_id: jwt.PyJWK.from_dict(public(key_id)) for key_id in SIGNERS}
        self.now_s = 0.0
        # PyJWT looks at the host's clock.
        self.time_s = unix_s()
        self.tokens = WebTokens(
            lambda: self.keys, RULES, **limits, now_s=lambda: self.now_s, time_s=lambda: self.time_s
        )


def token(key_id: str = "e", header: dict[str, Any] | None = None, signer: Any = None, **claims: Any) -> str:
    """A good one, but for what is given; None leaves a claim out."""
    now_s = unix_s()
    said = {
        "iss": "https://issuer", "aud": "rachis", "sub": "anna@example", "exp": now_s + 3600, "iat": now_s,
        "tenant": "acme", "roles": ["generate"], **claims,
    }  # fmt: skip
    key, algorithm = SIGNERS[key_id]
    told = {name: value for name, value in said.items() if value is not None}
    return jwt.encode(told, signer or key, algorithm=algorithm, headers={"kid": key_id, **(header or {})})


@pytest.mark.parametrize("key_id", SIGNERS)
def test_a_good_token_is_whose_it_says(key_id: str) -> None:
    world, given = World(), token(key_id)
    assert world.tokens.known(given) is None
    found = world.tokens.verified(given)
    assert found == Identity("anna@example", "acme", frozenset({Role.GENERATE}), 0)
    assert world.tokens.known(given) == found


@pytest.mark.parametrize(
    ("said", "roles"),
    [
        ("generate observe", {Role.GENERATE, Role.OBSERVE}),
        (["operate", "admin"], {Role.OPERATE}),
        ("", set()),
        (None, set()),
        ({"generate": True}, set()),
        (7, set()),
        ([["generate"]], set()),
    ],
)
def test_roles_are_those_that_there_are(said: Any, roles: set[Role]) -> None:
    found = World().tokens.verified(token(roles=said))
    assert found is not None and found.roles == roles


def _unsigned(header: dict[str, Any]) -> str:
    parts = (header, {"iss": "https://issuer", "aud": "rachis", "sub": "a", "exp": 1e12, "tenant": "acme"})
    return ".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts) + "."


def _signed_with_the_public_key() -> str:
    """As if the public key were a shared secret: what a verifier that goes by the token's own algorithm would take."""
    pem = ELLIPTIC.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    _, claims, _ = token("e").split(".")
    forged = base64.urlsafe_b64encode(json.dumps({"alg": "HS256", "kid": "e"}).encode()).decode().rstrip("=")
    signature = hmac.new(pem, f"{forged}.{claims}".encode(), hashlib.sha256).digest()
    return f"{forged}.{claims}.{base64.urlsafe_b64encode(signature).decode().rstrip('=')}"


@pytest.mark.parametrize(
    "given",
    [
        _unsigned({"alg": "none", "kid": "e"}),
        _unsigned({"alg": "None", "kid": "e"}),
        _signed_with_the_public_key(),
        token(signer=OTHER),
        token(header={"kid": "x"}),
        token(header={"kid": "r"}),
        token(iss="https://other"),
        token(aud="other"),
        token(aud=["other", "another"]),
        token(exp=unix_s() - 31),
        token(nbf=unix_s() + 3600),
        token(iat=unix_s() + 3600),
        token(exp=None),
        token(aud=None),
        token(iss=None),
        token(sub=None),
        token(sub=""),
        token(sub="a\nb"),
        token(tenant=None),
        token(tenant=""),
        token(tenant="a b"),
        token(tenant=["acme"]),
        token(exp="soon"),
        token()[:-2],
        f"{token()}.x",
        "..",
        "a.b.c",
        "é.ü.ö",
    ],
)
def test_a_token_that_is_not_good_is_nobodys(given: str) -> None:
    world = World()
    assert world.tokens.verified(given) is None
    assert world.tokens.known(given) is None


def test_clocks_may_differ_a_little() -> None:
    tokens = World().tokens
    assert tokens.verified(token(exp=unix_s() - 20)) is not None
    assert tokens.verified(token(nbf=unix_s() + 20)) is not None


def test_a_token_ends_and_so_does_the_key_that_has_signed_it() -> None:
    world, given = World(), token(exp=unix_s() + 100)
    assert world.tokens.verified(given) is not None
    world.time_s += 129
    assert world.tokens.known(given) is not None
    world.time_s += 2
    assert world.tokens.known(given) is None

    world = World()
    assert world.tokens.verified(given) is not None
    del world.keys["e"]
    assert world.tokens.known(given) is None and world.tokens.verified(given) is None


def test_strangers_cost_a_bounded_part_of_the_loop_and_who_is_known_goes_on() -> None:
    world, given = World(), token()
    assert world.tokens.verified(given) is not None
    with pytest.raises(OverloadedError, match="too many tokens") as raised:
        for _ in range(1000):
            world.tokens.verified("a.b.c")
    assert raised.value.retry_after_ms
    assert world.tokens.known(given) is not None
    world.now_s += 1.0
    assert world.tokens.verified(token()) is not None


def test_many_tokens_do_not_pile_up() -> None:
    world = World(most_known=5)
    given = [token("d", number=number) for number in range(8)]
    assert all(world.tokens.verified(each) for each in given)
    assert [world.tokens.known(each) is not None for each in given] == [False] * 3 + [True] * 5


def test_a_file_of_public_keys_is_read(tmp_path: Path) -> None:
    path = tmp_path / "jwks.json"
    path.write_text(json.dumps({"keys": [public(key_id) for key_id in SIGNERS]}))
    assert read_jwks(path).keys() == SIGNERS.keys()


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", '{"keys": []}', '{"keys": [{"kty": "EC"}]}',
        json.dumps({"keys": [{"kty": "oct", "k": "c2VjcmV0", "kid": "s", "alg": "HS256"}]}),
        json.dumps({"keys": [{name: value for name, value in public("e").items() if name != "kid"}]}),
    ],
)  # fmt: skip
def test_a_file_without_public_keys_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "jwks.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"security\.jwt_jwks_file: .*jwks\.json"):
        read_jwks(path)
