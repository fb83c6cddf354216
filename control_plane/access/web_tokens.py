"""JSON Web Tokens (RFC 7519) of an issuer that the service trusts, as identities. Verification is PyJWT's.

Signatures of public keys alone count, each by the algorithm of its key: no token says by which it is verified. A token
has to say until when, for whom, by whom and of whom it is. One that was verified is known by a digest until it ends.
"""

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jwt

from cluster_core.clock import monotonic_s, unix_s
from cluster_core.errors import ConfigError, OverloadedError
from control_plane.access.api_keys import NAME
from control_plane.access.key_digests import KeyDigests
from control_plane.access.roles import Identity, Role

JWKS_FIELD = "security.jwt_jwks_file"
# By which the clocks of issuer and router may differ.
_SKEW_S = 30.0
_ALGORITHMS = frozenset({"RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"})
_REQUIRED = ("exp", "iss", "aud", "sub")
_MOST_NAME_CHARACTERS = 128
# Tokens that nobody knows yet, each of which takes some 100 us of the router's loop.
_BURST = 200.0
_PER_S = 200.0
_RETRY_AFTER_MS = 1000

PublicKeys = Mapping[str, jwt.PyJWK]


@dataclass(frozen=True, slots=True)
class TokenRules:
    """Of whom tokens have to be, and for whom; and what says tenant and roles."""

    issuer: str
    audience: str
    tenant_claim: str
    roles_claim: str


def read_jwks(path: Path) -> dict[str, jwt.PyJWK]:
    """Public keys by their `kid`, of a file of RFC 7517. Raises ConfigError, OSError."""
    try:
        found = jwt.PyJWKSet.from_dict(json.loads(path.read_text()))
    except (ValueError, TypeError, AttributeError, jwt.PyJWTError) as error:
        raise ConfigError(f"{path} is no set of keys (JWKS): {error}", field=JWKS_FIELD) from None
    keys = {}
    for key in found.keys:
        if key.algorithm_name not in _ALGORITHMS or key.key_id is None:
            raise ConfigError(f"{path} has a key that is not public, or has no `kid`", field=JWKS_FIELD)
        keys[key.key_id] = key
    return keys


class WebTokens:
    """Of one router. keys: the issuer's, those that there are now. most_known: tokens that are remembered. time_s: Unix
    time."""

    def __init__(
        self,
        keys: Callable[[], PublicKeys],
        rules: TokenRules,
        *,
        most_known: int = 10_000,
        now_s: Callable[[], float] = monotonic_s,
        time_s: Callable[[], float] = unix_s,
    ) -> None:
        self._keys = keys
        self._rules = rules
        self._most_known = most_known
        self._now_s = now_s
        self._time_s = time_s
        self._digest = KeyDigests()
        # By digest: whose it is, the key that has signed it, and until when it is good.
        self._known: OrderedDict[bytes, tuple[Identity, str, float]] = OrderedDict()
        self._left, self._left_since_s = _BURST, now_s()

    def known(self, given: str) -> Identity | None:
        """Whose token that is, where it was verified before and is still good."""
        digest = self._digest(given)
        found = self._known.get(digest)
        if found is None:
            return None
        identity, key_id, until_s = found
        if self._time_s() >= until_s or key_id not in self._keys():
            del self._known[digest]
            return None
        return identity

    def verified(self, given: str) -> Identity | None:
        """None: it is not good. Raises OverloadedError where too many are looked at."""
        self._take()
        try:
            key_id = jwt.get_unverified_header(given).get("kid")
            key = self._keys().get(key_id) if isinstance(key_id, str) else None
            if key is None:
                return None
            claims = jwt.decode(
                given,
                key,
                algorithms=[key.algorithm_name],
                audience=self._rules.audience,
                issuer=self._rules.issuer,
                leeway=_SKEW_S,
                options={"require": list(_REQUIRED)},
            )
            identity = self._identity(claims)
        except (jwt.PyJWTError, ValueError, TypeError, OverflowError):
            return None
        if identity is not None:
            self._known[self._digest(given)] = identity, str(key_id), float(claims["exp"]) + _SKEW_S
            while len(self._known) > self._most_known:
                self._known.popitem(last=False)
        return identity

    def _identity(self, claims: Mapping[str, Any]) -> Identity | None:
        """None where it names no tenant."""
        tenant, said, name = (claims.get(each) for each in (self._rules.tenant_claim, self._rules.roles_claim, "sub"))
        if not isinstance(tenant, str) or not NAME.fullmatch(tenant):
            return None
        if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= _MOST_NAME_CHARACTERS:
            return None
        roles = said.split() if isinstance(said, str) else said if isinstance(said, list) else []
        return Identity(name, tenant, frozenset(role for role in Role if role.value in roles), 0)

    def _take(self) -> None:
        now_s = self._now_s()
        self._left = min(_BURST, self._left + (now_s - self._left_since_s) * _PER_S)
        self._left_since_s = now_s
        if self._left < 1:
            raise OverloadedError("too many tokens are looked at", retry_after_ms=_RETRY_AFTER_MS)
        self._left -= 1
