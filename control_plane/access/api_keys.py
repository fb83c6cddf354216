"""API keys as they are kept: who each is, and hashes of its secrets. Pure; `key_file` reads and writes them.

A key is `rk-ID-SECRET`. ID finds its record; SECRET has 256 random bits, of which scrypt's hash is kept (RFC 7914). A
key that is rotated has a second secret for a while: clients are given the new one before the old one ends. Instead of
secrets a record may have a name in certificates (`client_certificates`), by which its holder is known.
"""

import base64
import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from cluster_core.errors import ConfigError
from control_plane.access.roles import ANYBODY, SERVICE, Identity, Role
from control_plane.model.limits import MAX_PRIORITY

NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
NAME_RULE = "must be 1 to 64 letters, digits, dots, dashes or underscores"
# Of a certificate: `uri:…`, `dns:…` or `cn:…`.
_CERTIFICATE = re.compile(r"(?:uri:[!-~]{1,512}|dns:[a-z0-9*._-]{1,253}|cn:[ -~]{1,64})")
CERTIFICATE_RULE = "must be a name in certificates: uri:spiffe://…, dns:… in lower case, or cn:…"
_KEY = re.compile(r"rk-([a-z2-7]{16})-([A-Za-z0-9_-]{43})")
_VERSION = 1
# scrypt: 16 MiB, and some 50 ms of one core.
_COST = {"n": 1 << 14, "r": 8, "p": 1}
_SALT_BYTES = 16
# Of one key, that are good at once: each is tried for a wrong one.
_MOST_SECRETS = 3


@dataclass(frozen=True, slots=True)
class HashedSecret:
    """until_s: Unix time at which it ends; None: with its key."""

    salt: bytes
    hash: bytes
    until_s: float | None = None

    def fits(self, secret: str) -> bool:
        return hmac.compare_digest(self.hash, _hashed(secret, self.salt))

    def is_same(self, other: "HashedSecret") -> bool:
        """Whenever they end."""
        return (self.salt, self.hash) == (other.salt, other.hash)


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key. Times are Unix seconds."""

    key_id: str
    name: str
    tenant: str
    roles: frozenset[Role]
    lowest_priority: int
    created_s: float
    expires_s: float | None
    # The newest first.
    secrets: tuple[HashedSecret, ...]
    # The name in certificates by which its holder is known; empty: by secrets.
    certificate: str = ""

    @property
    def identity(self) -> Identity:
        return Identity(self.name, self.tenant, self.roles, self.lowest_priority)

    def has_expired(self, now_s: float) -> bool:
        return self.expires_s is not None and self.expires_s <= now_s

    def live_secrets(self, now_s: float) -> tuple[HashedSecret, ...]:
        if self.has_expired(now_s):
            return ()
        return tuple(each for each in self.secrets if each.until_s is None or each.until_s > now_s)


def parsed(given: str) -> tuple[str, str] | None:
    """(ID, SECRET) of what looks like a key."""
    found = _KEY.fullmatch(given)
    return (found[1], found[2]) if found is not None else None


def new_key(
    name: str, tenant: str, roles: Iterable[Role], *, lowest_priority: int, now_s: float, expires_s: float | None
) -> tuple[ApiKey, str]:
    """A key, and what its holder is given: that is nowhere else. Raises ConfigError."""
    key = _checked(name, tenant, frozenset(roles), lowest_priority, now_s, expires_s)
    secret, hashed = _new_secret()
    return replace(key, secrets=(hashed,)), f"rk-{key.key_id}-{secret}"


def new_certificate(
    name: str,
    tenant: str,
    roles: Iterable[Role],
    certificate: str,
    *,
    lowest_priority: int,
    now_s: float,
    expires_s: float | None,
) -> ApiKey:
    """Of who shows a certificate with that name. Raises ConfigError."""
    if not _CERTIFICATE.fullmatch(certificate):
        raise ConfigError(f"{CERTIFICATE_RULE}, got {certificate!r}", field="certificate")
    key = _checked(name, tenant, frozenset(roles), lowest_priority, now_s, expires_s)
    return replace(key, certificate=certificate)


def rotated(key: ApiKey, *, now_s: float, grace_s: float) -> tuple[ApiKey, str]:
    """The same key with a new secret; those it had end after `grace_s`. Raises ConfigError."""
    if key.certificate:
        raise ConfigError(f"`{key.name}` is known by a certificate, which its authority renews", field="name")
    secret, hashed = _new_secret()
    until_s = now_s + grace_s
    ending = tuple(
        replace(each, until_s=until_s if each.until_s is None else min(each.until_s, until_s))
        for each in key.live_secrets(now_s)
    )
    kept = ending[: _MOST_SECRETS - 1] if grace_s > 0 else ()
    return replace(key, secrets=(hashed, *kept)), f"rk-{key.key_id}-{secret}"


def written(keys: Mapping[str, ApiKey]) -> str:
    """keys: by their ids."""
    return json.dumps({"version": _VERSION, "keys": [_record(key) for key in keys.values()]}, indent=1) + "\n"


def read(text: str) -> dict[str, ApiKey]:
    """By id. Raises ConfigError, which quotes nothing of the text."""
    try:
        whole = json.loads(text)
        if whole["version"] != _VERSION:
            raise ConfigError(f"has version {whole['version']!r}, this is version {_VERSION}", field="keys")
        keys = {key.key_id: key for key in map(_key, whole["keys"])}
        certificates = [key.certificate for key in keys.values() if key.certificate]
        if len(certificates) > len(set(certificates)):
            raise ConfigError("has the same certificate twice", field="keys")
        return keys
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ConfigError(f"is no file of keys ({type(error).__name__})", field="keys") from None


def _checked(
    name: str, tenant: str, roles: frozenset[Role], lowest_priority: int, now_s: float, expires_s: float | None
) -> ApiKey:
    """One by which nobody is known yet. Raises ConfigError."""
    for field, value in (("name", name), ("tenant", tenant)):
        if not NAME.fullmatch(value):
            raise ConfigError(f"{NAME_RULE}, got {value!r}", field=field)
    if name in (ANYBODY.name, SERVICE.name):
        raise ConfigError(f"`{name}` is what the service itself calls somebody; give another name", field="name")
    if not roles:
        raise ConfigError(f"must be one or more of {', '.join(Role)}", field="role")
    if not -MAX_PRIORITY <= lowest_priority <= MAX_PRIORITY:
        raise ConfigError(
            f"must be in [{-MAX_PRIORITY}, {MAX_PRIORITY}], got {lowest_priority}", field="lowest_priority"
        )
    key_id = base64.b32encode(secrets.token_bytes(10)).decode().lower()
    return ApiKey(key_id, name, tenant, roles, lowest_priority, now_s, expires_s, ())


def _new_secret() -> tuple[str, HashedSecret]:
    secret, salt = secrets.token_urlsafe(32), secrets.token_bytes(_SALT_BYTES)
    return secret, HashedSecret(salt, _hashed(secret, salt))


def _hashed(secret: str, salt: bytes) -> bytes:
    return hashlib.scrypt(secret.encode(), salt=salt, **_COST)


def _record(key: ApiKey) -> dict[str, Any]:
    return {
        "id": key.key_id,
        "name": key.name,
        "tenant": key.tenant,
        "roles": sorted(key.roles),
        "lowest_priority": key.lowest_priority,
        "created_s": key.created_s,
        "expires_s": key.expires_s,
        "secrets": [
            {"salt": each.salt.hex(), "scrypt": each.hash.hex(), "until_s": each.until_s} for each in key.secrets
        ],
        **({"certificate": key.certificate} if key.certificate else {}),
    }


def _key(record: Mapping[str, Any]) -> ApiKey:
    for field in ("id", "name", "tenant"):
        if not NAME.fullmatch(record[field]):
            raise ValueError(f"{field} is none")
    certificate = record.get("certificate", "")
    if certificate and not _CERTIFICATE.fullmatch(certificate):
        raise ValueError("certificate is none")
    return ApiKey(
        record["id"],
        record["name"],
        record["tenant"],
        frozenset(Role(role) for role in record["roles"]),
        int(record["lowest_priority"]),
        float(record["created_s"]),
        _seconds(record["expires_s"]),
        tuple(
            HashedSecret(bytes.fromhex(each["salt"]), bytes.fromhex(each["scrypt"]), _seconds(each["until_s"]))
            for each in record["secrets"]
        ),
        certificate,
    )


def _seconds(value: Any) -> float | None:
    return None if value is None else float(value)
