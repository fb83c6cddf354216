"""From the key of a call to who calls. A key is hashed once; after that a router knows it by a digest.

What a wrong key costs is bounded. An id that is not in the file, of 80 random bits, costs a look into a table. A wrong
secret for one that is costs a hash: a few, then one each second, and so many calls wait for hashes and no more. Keys
that a router knows go on being served meanwhile.
"""

import asyncio
import hmac
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from cluster_core.clock import monotonic_s, unix_s
from cluster_core.errors import OverloadedError, UnauthenticatedError
from control_plane.access import api_keys
from control_plane.access.api_keys import ApiKey, HashedSecret
from control_plane.access.key_digests import KeyDigests
from control_plane.access.roles import SERVICE, Identity
from control_plane.access.web_tokens import WebTokens

# What everybody is told whose key is not good, whatever is wrong with it.
WRONG_KEY = "a valid API key is needed: `authorization: Bearer rk-…`"
# Calls that wait for a hash, of all keys together.
_MOST_WAITING = 2048
# Keys whose secrets have been wrong of late.
_MOST_FAILING = 4096
_BURST = 20.0
_PER_S = 1.0
_RETRY_AFTER_MS = 1000


Verify = Callable[[HashedSecret, str], bool]


class Logins:
    """Of one router. keys: those that there are now, by id. service_key: of the service's own processes."""

    def __init__(
        self,
        keys: Callable[[], Mapping[str, ApiKey]],
        service_key: str,
        tokens: WebTokens | None = None,
        *,
        verify: Verify = HashedSecret.fits,
        now_s: Callable[[], float] = monotonic_s,
        time_s: Callable[[], float] = unix_s,
    ) -> None:
        """tokens: of an issuer, where there is one. verify: slow, and called in a thread. time_s: Unix time."""
        self._keys = keys
        self._tokens = tokens
        self._service_key = service_key.encode()
        self._verify = verify
        self._now_s = now_s
        self._time_s = time_s
        self._digest = KeyDigests()
        # By digest: the id of a key, and the hashed secret that fitted.
        self._known: dict[bytes, tuple[str, HashedSecret]] = {}
        self._checking: dict[bytes, asyncio.Future[Identity]] = {}
        self._waiting = 0
        self._failures = FailedLogins()
        self._thread = ThreadPoolExecutor(1, "logins")
        # How often keys were hashed, and how logins ended that did not succeed.
        self.hashed = 0
        self.refused: Counter[str] = Counter()

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def known(self, given: str) -> Identity | None:
        """Whose key that is, where this router has found out before and it is still good."""
        if self.is_service(given):
            return SERVICE
        if self._tokens is not None and _is_token(given):
            return self._tokens.known(given)
        digest = self._digest(given)
        found = self._known.get(digest)
        if found is None:
            return None
        key_id, fitted = found
        current = self._keys().get(key_id)
        if current is None or not any(fitted.is_same(each) for each in current.live_secrets(self._time_s())):
            del self._known[digest]
            return None
        return current.identity

    def is_service(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._service_key)

    async def login(self, given: str) -> Identity:
        """Raises UnauthenticatedError, OverloadedError where the key has failed too often, or too many wait."""
        known = self.known(given)
        if known is not None:
            return known
        if self._tokens is not None and _is_token(given):
            return self._by_token(self._tokens, given)
        parts = api_keys.parsed(given)
        key = self._keys().get(parts[0]) if parts is not None else None
        if key is None or parts is None:
            raise self.unauthenticated()
        digest = self._digest(given)
        checking = self._checking.get(digest)
        if checking is None:
            if not self._failures.may_try(key.key_id, self._now_s()):
                raise self._overloaded("too_often", "too many failed logins with this key")
            checking = asyncio.ensure_future(self._look(key, parts[1], digest))
            self._checking[digest] = checking
            checking.add_done_callback(lambda task: self._looked(digest, task))
        if self._waiting >= _MOST_WAITING:
            raise self._overloaded("overloaded", "too many logins are looked at")
        self._waiting += 1
        try:
            return await asyncio.shield(checking)
        finally:
            self._waiting -= 1

    def _by_token(self, tokens: WebTokens, given: str) -> Identity:
        try:
            identity = tokens.verified(given)
        except OverloadedError:
            self.refused["overloaded"] += 1
            raise
        if identity is None:
            raise self.unauthenticated()
        return identity

    def unauthenticated(self, sentence: str = WRONG_KEY) -> UnauthenticatedError:
        """Of who is nobody, and counted."""
        self.refused["wrong_key"] += 1
        return UnauthenticatedError(sentence)

    def _overloaded(self, reason: str, sentence: str) -> OverloadedError:
        self.refused[reason] += 1
        return OverloadedError(sentence, retry_after_ms=_RETRY_AFTER_MS)

    async def _look(self, key: ApiKey, secret: str, digest: bytes) -> Identity:
        loop = asyncio.get_running_loop()
        for hashed in key.live_secrets(self._time_s()):
            self.hashed += 1
            if await loop.run_in_executor(self._thread, self._verify, hashed, secret):
                self._failures.succeeded(key.key_id)
                self._known[digest] = key.key_id, hashed
                # It may have been revoked meanwhile.
                current = self._keys().get(key.key_id)
                if current is not None:
                    return current.identity
        raise self.unauthenticated()

    def _looked(self, digest: bytes, task: "asyncio.Future[Identity]") -> None:
        """Who waited may be gone: what was raised is nobody's then."""
        self._checking.pop(digest, None)
        if not task.cancelled():
            task.exception()


def _is_token(given: str) -> bool:
    """Three parts with dots between them, which no key has."""
    return given.count(".") == 2


class FailedLogins:
    """A token bucket for each key: a try takes one, and gets it back where it succeeds."""

    def __init__(self) -> None:
        # The one that was tried last comes last.
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def may_try(self, key_id: str, now_s: float) -> bool:
        left, since_s = self._left.pop(key_id, (_BURST, now_s))
        left = min(_BURST, left + (now_s - since_s) * _PER_S)
        may = left >= 1
        self._left[key_id] = (left - may, now_s)
        while len(self._left) > _MOST_FAILING:
            self._left.popitem(last=False)
        return may

    def succeeded(self, key_id: str) -> None:
        if key_id in self._left:
            left, since_s = self._left[key_id]
            self._left[key_id] = (min(_BURST, left + 1), since_s)
