"""Keeps a `Membership` in step with the registry in Redis. The registry is never on a request's path.

Redis that does not answer leaves the last known workers in place: requests go on, `connected` turns false. When it
answers again, possibly empty, workers have one lease to register before they count as gone.
"""

import asyncio
import logging
from collections.abc import Callable

from google.protobuf.message import DecodeError
from rachis import registry
from rachis.redis_client import REDIS_DOWN, connect, not_cancelled
from rachis.v1 import worker_pb2 as wire

from cluster_core.clock import monotonic_s
from control_plane.fleet.membership import Membership

logger = logging.getLogger(__name__)

_TIMEOUT_S = 2.0


class RegistryFollower:
    """Reads all registrations every `refresh_s` until cancelled; `changed` is set whenever placement sees a change.

    on_read: called each time that the membership has been brought up to date.
    """

    def __init__(
        self,
        url: str,
        service_id: str,
        membership: Membership,
        *,
        refresh_s: float,
        worker_lease_s: float,
        on_read: Callable[[], None] = lambda: None,
    ) -> None:
        self._redis = connect(url, _TIMEOUT_S)
        self._service_id = service_id
        self._membership = membership
        self._refresh_s = refresh_s
        self._worker_lease_s = worker_lease_s
        self._on_read = on_read
        self._keep_until_s = 0.0
        self._skew_told: set[str] = set()
        self.connected = True
        self.changed = asyncio.Condition()

    async def follow(self) -> None:
        while not_cancelled():
            try:
                registrations = await self._read()
            except REDIS_DOWN as error:
                if self.connected:
                    logger.warning("the registry does not answer, the last known workers stay: %s", error)
                self.connected = False
            except Exception:
                logger.exception("the registry cannot be read, the last known workers stay")
                self.connected = False
            else:
                now = monotonic_s()
                if not self.connected:
                    logger.warning("the registry answers again")
                    self._keep_until_s = now + self._worker_lease_s
                self.connected = True
                if now < self._keep_until_s:
                    registrations = self._with_known(registrations)
                changed = self._membership.replace(registrations, now)
                self._tell_of_skew()
                self._on_read()
                if changed:
                    async with self.changed:
                        self.changed.notify_all()
            await asyncio.sleep(self._refresh_s)

    async def close(self) -> None:
        await self._redis.aclose()

    def _tell_of_skew(self) -> None:
        skewed = {f"{member.worker_id} gets no requests: {member.version_skew}" for member in self._membership.skewed()}
        for sentence in skewed - self._skew_told:
            logger.error(sentence)
        self._skew_told = skewed

    def _with_known(self, registrations: list[wire.WorkerRegistration]) -> list[wire.WorkerRegistration]:
        fresh = {record.worker_id for record in registrations}
        known = [member.registration for member in self._membership.members() if member.worker_id not in fresh]
        return registrations + known

    async def _read(self) -> list[wire.WorkerRegistration]:
        names = await self._redis.smembers(registry.workers_key(self._service_id))
        keys = [registry.worker_key(self._service_id, _bytes(name).decode()) for name in sorted(names)]
        records = await self._redis.mget(keys) if keys else []
        parsed = [_registration(key, record) for key, record in zip(keys, records, strict=True) if record is not None]
        return [registration for registration in parsed if registration is not None]


def _registration(key: str, record: bytes | str) -> wire.WorkerRegistration | None:
    """The record, or None for one that cannot be read: the others still count."""
    try:
        return wire.WorkerRegistration.FromString(_bytes(record))
    except DecodeError:
        logger.error("the registry's record %s is damaged and left out", key)
        return None


def _bytes(value: bytes | str) -> bytes:
    """The client is made without `decode_responses`, its types allow for both."""
    return value if isinstance(value, bytes) else value.encode()
