"""Whether the index says the truth: what it believes of each worker, against what lies in the pools of its engine.

Events travel, so that a single look finds differences that are none. A worker that differs is read again, for a bounded
time; only what is different in every look is a difference.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import worker_pb2 as wire

from cluster_core.clock import monotonic_s
from cluster_core.errors import RachisError
from control_plane.fleet.membership import Member, Membership
from control_plane.prefix_index.index import PrefixIndex
from kv_transfer.claims.prefix_chunks import Keys, short_name

# (address, seconds) -> what the worker's engine holds. Raises RachisError.
ReadClaims = Callable[[str, float], Awaitable[wire.GetPrefixClaimsResponse]]

SETTLE_S = 2.0
BETWEEN_LOOKS_S = 0.25
_WORKER_TIMEOUT_S = 2.0
_MOST_NAMES = 5


@dataclass(frozen=True, slots=True, eq=False)
class TierLook:
    """Claims on one tier."""

    # In index and pool.
    agreed: int
    # In the pool alone.
    missing: Keys
    # In the index alone.
    untrue: Keys

    def and_still(self, later: "TierLook") -> "TierLook":
        """What both looks found different."""
        return TierLook(
            later.agreed, np.intersect1d(self.missing, later.missing), np.intersect1d(self.untrue, later.untrue)
        )


def compared(believed: Keys, held: Keys) -> TierLook:
    return TierLook(
        agreed=len(np.intersect1d(believed, held)),
        missing=np.setdiff1d(held, believed),
        untrue=np.setdiff1d(believed, held),
    )


@dataclass(slots=True)
class _Comparison:
    """One worker so far."""

    member: Member
    check: admin.WorkerCheck
    device: TierLook | None = None
    host: TierLook | None = None

    @property
    def agrees(self) -> bool:
        looks = [look for look in (self.device, self.host) if look is not None]
        return not any(len(look.missing) or len(look.untrue) for look in looks)


class IndexCheck:
    """settle_s: how long differences may be on their way; between_s: from one look to the next."""

    def __init__(
        self,
        membership: Membership,
        index: PrefixIndex,
        read_claims: ReadClaims,
        *,
        settle_s: float = SETTLE_S,
        between_s: float = BETWEEN_LOOKS_S,
        now_s: Callable[[], float] = monotonic_s,
    ) -> None:
        self._membership = membership
        self._index = index
        self._read_claims = read_claims
        self._settle_s = settle_s
        self._between_s = between_s
        self._now_s = now_s
        self._reading = asyncio.Lock()
        self._untrue: dict[str, int] | None = None

    @property
    def untrue(self) -> dict[str, int] | None:
        """By worker that has not left, claims of both tiers that the last check found untrue; None: there was none."""
        if self._untrue is None:
            return None
        there = {member.worker_id for member in self._membership.members()}
        return {worker_id: count for worker_id, count in self._untrue.items() if worker_id in there}

    async def run(self) -> admin.CheckIndexResponse:
        """Reads all workers, until they agree or the time is over; the last answer takes two seconds at most."""
        started_s = self._now_s()
        comparisons = [
            _Comparison(member, admin.WorkerCheck(worker_id=member.worker_id, pool=member.registration.pool))
            for member in self._membership.members()
        ]
        differing = comparisons
        while differing:
            await asyncio.gather(*(self._look(each, started_s) for each in differing))
            differing = [each for each in differing if not each.check.error and not each.agrees]
            if not differing or self._now_s() - started_s + self._between_s > self._settle_s:
                break
            await asyncio.sleep(self._between_s)
        for each in comparisons:
            _report(each)
        checks = [each.check for each in comparisons]
        self._untrue = {check.worker_id: check.device.untrue + check.host.untrue for check in checks if not check.error}
        return admin.CheckIndexResponse(workers=checks, took_s=self._now_s() - started_s)

    async def _look(self, comparison: _Comparison, started_s: float) -> None:
        check, worker_id = comparison.check, comparison.member.worker_id
        address = comparison.member.registration.address
        if not address:
            check.error = "it is starting"
            return
        try:
            answer = await self._read_claims(address, _WORKER_TIMEOUT_S)
        except RachisError as error:
            check.error = str(error)
            return
        # What is compared is the index as it is now. The larger it is, the longer reading it holds up the loop: others
        # have a turn between two workers.
        async with self._reading:
            await asyncio.sleep(0)
            believed = self._index.claims(worker_id)
        check.index_generation, check.generation = self._index.generation(worker_id), answer.generation
        device = await asyncio.to_thread(compared, believed[0], _keys(answer.device))
        host = await asyncio.to_thread(compared, believed[1], _keys(answer.host))
        comparison.device = device if comparison.device is None else comparison.device.and_still(device)
        comparison.host = host if comparison.host is None else comparison.host.and_still(host)
        check.after_s = self._now_s() - started_s


def _report(comparison: _Comparison) -> None:
    check = comparison.check
    if check.error or comparison.device is None or comparison.host is None:
        return
    check.device.CopyFrom(_tier_check(comparison.device))
    check.host.CopyFrom(_tier_check(comparison.host))


def _tier_check(look: TierLook) -> admin.TierCheck:
    names = [short_name(key) for key in look.untrue[:_MOST_NAMES].tolist()]
    return admin.TierCheck(agreed=look.agreed, missing=len(look.missing), untrue=len(look.untrue), untrue_names=names)


def _keys(packed: bytes) -> Keys:
    return np.frombuffer(packed[: len(packed) // 8 * 8], dtype="<u8")
