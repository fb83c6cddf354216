"""Keeps a `Membership` in step with the registry in Redis. The registry is never on a request's path.

Redis that does not answer leaves the last known workers in place: requests go on, `connected` turns false. When it
answers again, possibly empty, workers have one lease to register before they count as gone. So they have when Redis has
lost its data without a pause: names of workers are never taken out of the registry, only their records end. And so they
have when the records of all of several workers end between two reads: Redis's clock was set forward, or the host slept.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable

from google.protobuf.message import DecodeError
from rachis.v1 import worker_pb2 as wire

from cluster_core.clock import monotonic_s
from cluster_wire import registry
from cluster_wire.redis_client import REDIS_DOWN, RedisClient
from cluster_wire.redis_loop import LoopWords, RedisLoop
from cluster_wire.redis_memory import RedisMemory, redis_memory
from control_plane.fleet.membership import Membership

logger = logging.getLogger(__name__)

_WORDS = LoopWords(
    logger,
    away="the registry does not answer, the last known workers stay: %s",
    back="the registry answers again",
    defect="the registry cannot be read, the last known workers stay",
)
# Whoever asks how full Redis is waits so long for it.
_MEMORY_TIMEOUT_S = 1.0


class RegistryFollower:
    """Reads all registrations every `refresh_s` until cancelled; `changed` is set whenever placement sees a change.

    on_read: called each time that the membership has been brought up to date.
    """

    def __init__(
        self,
        redis: RedisClient,
        service_id: str,
        membership: Membership,
        *,
        refresh_s: float,
        worker_lease_s: float,
        on_read: Callable[[], None] = lambda: None,
        unsealed: Callable[[bytes], bytes | None] = lambda record: record,
        now_s: Callable[[], float] = monotonic_s,
    ) -> None:
        """unsealed: what a record says, or None where a stranger has written it."""
        self._unsealed = unsealed
        self._redis = redis
        self._service_id = service_id
        self._membership = membership
        self._worker_lease_s = worker_lease_s
        self._on_read = on_read
        self._now_s = now_s
        self._keep_until_s = 0.0
        # Names that the registry had when it was read last, and whether more was gone then than workers that leave.
        self._names: set[str] = set()
        self._has_lost = False
        # How often Redis may have lost what it had: it was away, or names were gone, or all records.
        self.losses = 0
        # What was said of workers whose versions do not fit.
        self._skew_said: set[str] = set()
        # Records that could not be read.
        self._bad_said: set[str] = set()
        self._loop = RedisLoop(self._refresh, lambda: asyncio.sleep(refresh_s), _WORDS)
        self.changed = asyncio.Condition()

    @property
    def connected(self) -> bool:
        """Whether the registry answered when it was read last."""
        return self._loop.is_well

    async def redis_memory(self) -> RedisMemory | None:
        """How full Redis is; None as well where it does not answer at once."""
        try:
            async with asyncio.timeout(_MEMORY_TIMEOUT_S):
                return await redis_memory(self._redis, self._service_id) if self.connected else None
        except REDIS_DOWN:
            return None

    async def follow(self) -> None:
        await self._loop.run()

    async def _refresh(self) -> None:
        registrations = await self.read()
        now = self._now_s()
        had_lost, self._has_lost = self._has_lost, self._lacks_known_names() or self._lacks_all_records(registrations)
        if not self.connected or (self._has_lost and not had_lost):
            self._keep_until_s = now + self._worker_lease_s
            self.losses += 1
        if now < self._keep_until_s:
            registrations = self._with_known(registrations)
        changed = self._membership.replace(registrations)
        self._complain_of_skew()
        self._on_read()
        if changed:
            async with self.changed:
                self.changed.notify_all()

    async def close(self) -> None:
        await self._redis.aclose()

    def _complain_of_skew(self) -> None:
        skewed = {f"{member.worker_id} gets no requests: {member.version_skew}" for member in self._membership.skewed()}
        for sentence in skewed - self._skew_said:
            logger.error(sentence)
        self._skew_said = skewed

    def _lacks_known_names(self) -> bool:
        return any(member.worker_id not in self._names for member in self._membership.members())

    def _lacks_all_records(self, registrations: Iterable[wire.WorkerRegistration]) -> bool:
        """Of several workers that did not say that they leave."""
        known = {
            str(member.worker_id)
            for member in self._membership.members()
            if member.registration.state != wire.WORKER_STATE_DRAINING
        }
        return len(known) > 1 and known.isdisjoint(record.worker_id for record in registrations)

    def _with_known(self, registrations: list[wire.WorkerRegistration]) -> list[wire.WorkerRegistration]:
        fresh = {record.worker_id for record in registrations}
        known = [member.registration for member in self._membership.members() if member.worker_id not in fresh]
        return registrations + known

    async def read(self) -> list[wire.WorkerRegistration]:
        """What the registry says now. Raises one of REDIS_DOWN."""
        found = await self._redis.smembers(registry.workers_key(self._service_id))
        self._names = {_bytes(name).decode() for name in found}
        keys = [registry.worker_key(self._service_id, name) for name in sorted(self._names)]
        records = await self._redis.mget(keys) if keys else []
        there = [(key, record) for key, record in zip(keys, records, strict=True) if record is not None]
        parsed = {key: self._registration(_bytes(record)) for key, record in there}
        bad = {key for key, registration in parsed.items() if registration is None}
        for key in bad - self._bad_said:
            logger.error("the registry's record %s is damaged, or a stranger's, and left out", key)
        self._bad_said = bad
        return [registration for registration in parsed.values() if registration is not None]

    def _registration(self, record: bytes) -> wire.WorkerRegistration | None:
        """The record, or None for one that cannot be read: the others still count."""
        said = self._unsealed(record)
        try:
            return wire.WorkerRegistration.FromString(said) if said is not None else None
        except DecodeError:
            return None


def _bytes(value: bytes | str) -> bytes:
    """The client is made without `decode_responses`, its types allow for both."""
    return value if isinstance(value, bytes) else value.encode()
