"""From the key of a call to who calls. A key is hashed once; after that a router knows it by a digest.

What a wrong key costs is bounded: an address may fail so often and then a little each second, one thread hashes, and
few wait for it. Keys that a router knows go on being served meanwhile.
"""

import asyncio
import hashlib
import hmac
import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from cluster_core.clock import monotonic_s, unix_ms
from cluster_core.errors import OverloadedError, UnauthenticatedError
from control_plane.access import api_keys
from control_plane.access.api_keys import ApiKey, HashedSecret
from control_plane.access.roles import SERVICE, Identity

# What everybody is told whose key is not good, whatever is wrong with it.
WRONG_KEY = "a valid API key is needed: `authorization: Bearer rk-…`"
_MOST_WAITING = 64
_MOST_ADDRESSES = 4096
_BURST = 20.0
_PER_S = 1.0
_RETRY_AFTER_MS = 1000


def _unix_s() -> float:
    return unix_ms() / 1000


Verify = Callable[[HashedSecret, str], bool]


class Logins:
    """Of one router. keys: those that there are now, by id. service_key: of the service's own processes."""

    def __init__(
        self,
        keys: Callable[[], Mapping[str, ApiKey]],
        service_key: str,
        *,
        verify: Verify = HashedSecret.fits,
        now_s: Callable[[], float] = monotonic_s,
        time_s: Callable[[], float] = _unix_s,
    ) -> None:
        """verify: slow, and called in a thread. time_s: Unix time."""
        self._keys = keys
        self._service_key = service_key.encode()
        self._verify = verify
        self._now_s = now_s
        self._time_s = time_s
        # Tables by what a key's digest under this is tell nobody a key.
        self._digest_key = secrets.token_bytes(32)
        # By digest: the key as it was found to be, and the hashed secret that fitted.
        self._known: dict[bytes, tuple[ApiKey, HashedSecret]] = {}
        self._checking: dict[bytes, asyncio.Future[Identity]] = {}
        self._failures = FailedLogins()
        self._thread = ThreadPoolExecutor(1, "logins")
        # How often keys were hashed, and how logins ended that did not succeed.
        self.hashed = 0
        self.refused: Counter[str] = Counter()

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def known(self, given: str) -> Identity | None:
        """Whose key that is, where this router has found out before and nothing has changed since."""
        if self.is_service(given):
            return SERVICE
        digest = self._digest(given)
        found = self._known.get(digest)
        if found is None:
            return None
        key, fitted = found
        now_s = self._time_s()
        current = self._keys().get(key.key_id)
        if current is None or fitted not in current.live_secrets(now_s):
            del self._known[digest]
            return None
        return current.identity

    def is_service(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._service_key)

    async def login(self, given: str, address: str) -> Identity:
        """Raises UnauthenticatedError, OverloadedError where the address has failed too often, or too many wait."""
        known = self.known(given)
        if known is not None:
            return known
        digest = self._digest(given)
        checking = self._checking.get(digest)
        if checking is None:
            if not self._failures.may_try(address, self._now_s()):
                self._refuse("too_often", "too many failed logins from this address")
            if len(self._checking) >= _MOST_WAITING:
                self._refuse("overloaded", "too many logins are looked at")
            checking = asyncio.ensure_future(self._look(given, digest, address))
            self._checking[digest] = checking
            checking.add_done_callback(lambda task: self._looked(digest, task))
        return await asyncio.shield(checking)

    def refuse_without_key(self) -> UnauthenticatedError:
        self.refused["wrong_key"] += 1
        return UnauthenticatedError(WRONG_KEY)

    def _refuse(self, reason: str, sentence: str) -> None:
        self.refused[reason] += 1
        raise OverloadedError(sentence, retry_after_ms=_RETRY_AFTER_MS)

    async def _look(self, given: str, digest: bytes, address: str) -> Identity:
        parts = api_keys.parsed(given)
        if parts is None:
            raise self.refuse_without_key()
        key_id, secret = parts
        key = self._keys().get(key_id)
        live = key.live_secrets(self._time_s()) if key is not None else ()
        loop = asyncio.get_running_loop()
        for hashed in live or (api_keys.NO_SECRET,):
            self.hashed += 1
            if await loop.run_in_executor(self._thread, self._verify, hashed, secret) and key is not None:
                self._failures.succeeded(address)
                self._known[digest] = key, hashed
                # It may have been revoked meanwhile.
                identity = self.known(given)
                if identity is not None:
                    return identity
        raise self.refuse_without_key()

    def _looked(self, digest: bytes, task: "asyncio.Future[Identity]") -> None:
        """Who waited may be gone: what was raised is nobody's then."""
        self._checking.pop(digest, None)
        if not task.cancelled():
            task.exception()

    def _digest(self, given: str) -> bytes:
        return hashlib.blake2b(given.encode(), key=self._digest_key, digest_size=16).digest()


class FailedLogins:
    """A token bucket for each address: a try takes one, and gets it back where it succeeds."""

    def __init__(self) -> None:
        # The one that tried last comes last.
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def may_try(self, address: str, now_s: float) -> bool:
        left, since_s = self._left.pop(address, (_BURST, now_s))
        left = min(_BURST, left + (now_s - since_s) * _PER_S)
        may = left >= 1
        self._left[address] = (left - may, now_s)
        while len(self._left) > _MOST_ADDRESSES:
            self._left.popitem(last=False)
        return may

    def succeeded(self, address: str) -> None:
        if address in self._left:
            left, since_s = self._left[address]
            self._left[address] = (min(_BURST, left + 1), since_s)
