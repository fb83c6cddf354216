"""Who calls this router, and what they may do here: one object, asked at the door and by what stands behind it.

The door logs callers in before a handler runs. Handlers to which it matters who calls ask `identity`, which serves
nobody who has not been logged in.
"""

import asyncio
import ssl
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from rachis.metadata_channel import Metadata
from rachis.v1 import worker_pb2 as wire

from cluster_configs.schema import SecuritySection
from cluster_core.errors import PermissionDeniedError, UnauthenticatedError
from cluster_wire.calls import Context
from cluster_wire.members import CallMetadata, caller_certificate, member_metadata, unsealed
from cluster_wire.secret import Secret, Sharing, read_secret
from cluster_wire.worker_tls import MakeChannel, worker_channel
from control_plane.access.api_keys import ApiKey
from control_plane.access.client_certificates import OWN_FIELD, ClientCertificates, read_names
from control_plane.access.followed_file import FollowedFile
from control_plane.access.key_file import KeyFile
from control_plane.access.logins import WRONG_KEY, Logins
from control_plane.access.roles import ANYBODY, Identity, Need
from control_plane.access.tenant_limits import TENANTS_FIELD, UNLIMITED, LimitsOf, TenantLimits, limits_of, read_tenants
from control_plane.access.web_tokens import JWKS_FIELD, TokenRules, WebTokens, read_jwks

# What gRPC calls a client's certificate, where it has asked for one.
CERTIFICATE = "x509_pem_cert"
# Metadata of a call: its caller's key.
AUTHORIZATION = "authorization"
_SCHEME = "bearer "
_REFRESH_S = 1.0
_NOT_OWN = "certificates of callers are taken from gateways that show one with a name of the router's own"


class Access:
    """Of a service that is open to everybody: nobody is asked. secret: what salts are derived from."""

    def __init__(self, secret: Secret | None = None, sharing: Sharing = "never") -> None:
        self._secret = secret
        self._sharing: Sharing = sharing

    @property
    def is_open(self) -> bool:
        return True

    def unsealed(self, record: bytes) -> bytes | None:
        """What a worker of the service has written; None: it was none."""
        return unsealed(self._secret, record)

    @property
    def as_member(self) -> Metadata:
        """What calls to workers bring along."""
        return member_metadata(self._secret)

    @property
    def worker_channel(self) -> MakeChannel:
        """What makes a channel to a worker: one that has the same secret, where there is one."""
        return worker_channel(self._secret)

    @property
    def refused(self) -> Mapping[str, int]:
        """Calls that were refused at the door, by why."""
        return {}

    def identity(self, context: Context) -> Identity:
        """Of a call that is served. Raises UnauthenticatedError."""
        return ANYBODY

    def limits_of(self, tenant: str) -> TenantLimits:
        """What a tenant may have, as the operator has said last."""
        return UNLIMITED

    def share(self, tenant: str) -> wire.TenantShare:
        """What workers are told of whose a request is."""
        if not tenant or self._secret is None:
            return wire.TenantShare()
        return wire.TenantShare(tenant_id=self._secret.tenant_id(tenant), weight=self.limits_of(tenant).weight)

    def salt(self, caller: Identity, cache_salt: str) -> str:
        """What the KV of the caller's prompt is kept under. cache_salt: the caller's own."""
        return cache_salt if self._secret is None else self._secret.salt(caller.tenant, cache_salt, self._sharing)

    async def follow(self) -> None:
        """Takes up what changes, until cancelled."""

    def close(self) -> None:
        """Nothing is held."""


class KeyedAccess(Access):
    """Of a service with keys. `follow` until cancelled, then `close`."""

    def __init__(
        self,
        files: Sequence[FollowedFile[Any]],
        logins: Logins,
        secret: Secret,
        sharing: Sharing,
        certificates: ClientCertificates | None = None,
        limits_of: LimitsOf = lambda tenant: UNLIMITED,
    ) -> None:
        """files: that say who there is, and what tenants may have. certificates: where clients show some, and are known
        by them."""
        super().__init__(secret, sharing)
        self._members = secret
        self._files = files
        self._logins = logins
        self._certificates = certificates
        self._limits_of = limits_of
        self._forbidden = 0

    @property
    def is_open(self) -> bool:
        return False

    @property
    def refused(self) -> Mapping[str, int]:
        return Counter(self._logins.refused) + Counter({"forbidden": self._forbidden})

    def limits_of(self, tenant: str) -> TenantLimits:
        return self._limits_of(tenant)

    def identity(self, context: Context) -> Identity:
        metadata = context.invocation_metadata() or ()
        if self.goes_by_certificate(metadata):
            return self.certified(metadata, certificate_of(context))
        found = self.known(metadata)
        if found is None:
            raise UnauthenticatedError(WRONG_KEY)
        return found

    def goes_by_certificate(self, metadata: CallMetadata) -> bool:
        """Whether the caller is who a certificate says, which its connection has shown here or at a gateway: one that
        brings a key, good or not, is judged by that."""
        if self._certificates is None:
            return False
        is_without_key = all(name != AUTHORIZATION for name, _ in metadata)
        return is_without_key or caller_certificate(self._members, metadata) is not None

    def certified(self, metadata: CallMetadata, shown: bytes | None) -> Identity:
        """Of whom that goes by. shown: PEM, of the connection; None: it has shown none. Raises UnauthenticatedError."""
        certificates, handed_on = self._certificates, caller_certificate(self._members, metadata)
        if certificates is not None and shown is not None:
            if handed_on is not None:
                # Whoever has the service's secret, as workers do, is no gateway yet.
                if not certificates.is_own(shown):
                    raise self._logins.unauthenticated(_NOT_OWN)
                shown = ssl.DER_cert_to_PEM_cert(handed_on).encode()
            found = certificates.identity(shown)
            if found is not None:
                return found
        raise self._logins.unauthenticated()

    def known(self, metadata: CallMetadata) -> Identity | None:
        """Whose call that is, where nothing has to be looked at."""
        given = _bearer(metadata)
        return self._logins.known(given) if given else None

    async def login(self, metadata: CallMetadata) -> Identity:
        """Raises UnauthenticatedError, OverloadedError."""
        given = _bearer(metadata)
        if not given:
            raise self._logins.unauthenticated()
        return await self._logins.login(given)

    def check(self, caller: Identity, need: Need) -> None:
        """Raises PermissionDeniedError."""
        if not caller.may(need):
            self._forbidden += 1
            raise PermissionDeniedError(caller.lacks(need))

    async def follow(self) -> None:
        await asyncio.gather(*(file.follow() for file in self._files))

    def close(self) -> None:
        for file in self._files:
            file.close()
        self._logins.close()


def access_of(section: SecuritySection) -> Access:
    """Of a router with this configuration. Raises ConfigError."""
    secret = read_secret(Path(section.secret_file)) if section.secret_file is not None else None
    if not section.knows_callers or secret is None:
        return Access(secret, section.sharing)
    files: list[FollowedFile[Any]] = []
    keys, tokens = _keys(section, files), _tokens(section, files)
    certificates, limits = _certificates(section, keys, files), _limits(section, files)
    for file in files:
        file.read()
    logins = Logins(keys, secret.service_key, tokens)
    return KeyedAccess(files, logins, secret, section.sharing, certificates, limits)


def _keys(section: SecuritySection, files: list[FollowedFile[Any]]) -> Callable[[], Mapping[str, ApiKey]]:
    """files: gets those that are to be followed."""
    if section.keys_file is None:
        return dict
    file = KeyFile(Path(section.keys_file), _REFRESH_S)
    files.append(file)
    return lambda: file.keys


def _certificates(
    section: SecuritySection, keys: Callable[[], Mapping[str, ApiKey]], files: list[FollowedFile[Any]]
) -> ClientCertificates | None:
    """As `_keys`."""
    if section.keys_file is None or section.client_ca_file is None or section.certificate_file is None:
        return None
    own = FollowedFile(Path(section.certificate_file), read_names, field=OWN_FIELD, refresh_s=_REFRESH_S)
    files.append(own)
    return ClientCertificates(keys, lambda: own.value)


def _limits(section: SecuritySection, files: list[FollowedFile[Any]]) -> LimitsOf:
    """As `_keys`."""
    if section.tenants_file is None:
        return lambda tenant: UNLIMITED
    file = FollowedFile(Path(section.tenants_file), read_tenants, field=TENANTS_FIELD, refresh_s=_REFRESH_S)
    files.append(file)
    return lambda tenant: limits_of(file.value, tenant)


def _tokens(section: SecuritySection, files: list[FollowedFile[Any]]) -> WebTokens | None:
    """As `_keys`."""
    if section.jwt_jwks_file is None:
        return None
    file = FollowedFile(Path(section.jwt_jwks_file), read_jwks, field=JWKS_FIELD, refresh_s=_REFRESH_S)
    files.append(file)
    claims = (section.jwt_tenant_claim, section.jwt_roles_claim)
    return WebTokens(lambda: file.value, TokenRules(section.jwt_issuer, section.jwt_audience, *claims))


def certificate_of(context: Context) -> bytes | None:
    """PEM, that the connection of a call has shown."""
    return next(iter(context.auth_context().get(CERTIFICATE) or ()), None)


def address_of(peer: str) -> str:
    """Of what gRPC calls a peer, such as `ipv4:127.0.0.1:4711` or `unix:`, the part without the port."""
    kind, _, rest = unquote(peer).partition(":")
    return rest.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else kind


def _bearer(metadata: CallMetadata) -> str:
    """The key that a call brings; empty: none, or several that differ."""
    given = {value for key, value in metadata if key == AUTHORIZATION}
    if len(given) != 1:
        return ""
    (value,) = given
    if not isinstance(value, str) or value[: len(_SCHEME)].lower() != _SCHEME or not value.isascii():
        return ""
    return value[len(_SCHEME) :].strip()
