"""What tenants may still have of their rates at one router: a part of buckets that all routers share. Pure.

Of each tenant and limit there is one bucket in Redis (`shared_rates`), which fills at the rate up to a burst of it. A
router has its part of that, one of as many parts as there are routers, and by it decides alone: no request waits for
Redis. What it has spent it tells, again and again, and gets to know what there is; its part is as large as the bucket
says then, less what it has spent since. So one router that has all of a tenant's requests gets the whole rate, and many
get it between them. What is spent in between at other routers is known a moment later, as a debt.

A request is taken while neither bucket is in debt, whatever it costs: requests at its beginning, the tokens of the
prompt when it has a slot, those of the answer when it has ended. max_tokens is not charged. What waits for a slot
counts at its own router as if it were spent, and is not until it has one: nothing ever comes back to a bucket, which
may have forgotten a part of it. A bucket that is in debt fills first, so that over time a tenant gets its rate and no
more. An answer that goes on at another router is charged, too, and refused only below a burst of debt: it was taken
once.

While Redis does not answer a router goes on with its part, and neither lets everything through nor nothing.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from cluster_core.errors import OverloadedError
from control_plane.access.tenant_limits import LimitsOf, TenantLimits

# What a bucket may owe, in seconds of its rate: whoever owes that comes back in so long.
MOST_DEBT_S = 3600.0
# Tenants that are known at once; beyond, who was not seen for longest is forgotten.
_MOST_TENANTS = 10_000
_WORDS = {"requests_per_s": "requests", "tokens_per_s": "tokens"}

Limit = Literal["requests_per_s", "tokens_per_s"]
LIMITS: tuple[Limit, ...] = ("requests_per_s", "tokens_per_s")


class Spent(NamedTuple):
    """What a router tells of one bucket: how it fills, and what was taken from it. number: of this amount, the same
    until it is answered, so that it is taken once; a later one is higher."""

    tenant: str
    limit: Limit
    rate_per_s: float
    burst: float
    amount: float
    number: int


@dataclass(slots=True)
class _Part:
    """Of one bucket, at this router. untold: what was spent since it was told last; telling: what is on its way, by its
    number, until it is answered. is_behind: it was not, the last time. is_heard: Redis has said once what there is."""

    balance: float
    since_s: float
    untold: float = 0.0
    telling: float = 0.0
    number: int = 0
    is_behind: bool = False
    is_heard: bool = False


@dataclass(slots=True)
class TenantRates:
    """Of one router. routers: as many parts there are of each bucket. refused: requests by the limit."""

    limits_of: LimitsOf
    routers: int = 1
    refused: Counter[Limit] = field(default_factory=Counter)
    # Tokens by tenant of what waits for a slot.
    waiting: Counter[str] = field(default_factory=Counter)
    _number: int = 0
    # The one that was seen last comes last.
    _parts: OrderedDict[str, dict[Limit, _Part]] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        """Tenants whose buckets are not full, as far as this router knows."""
        return len(self._parts)

    def begin(self, tenant: str, now_s: float, *, resumed: bool = False) -> bool:
        """Takes one request. True: nothing was known of the tenant before. Raises OverloadedError.

        resumed: its answer had begun at another router.
        """
        limits = self.limits_of(tenant)
        is_new = tenant not in self._parts
        for limit, rate_per_s in _rates(limits):
            part = self._part(tenant, limit, rate_per_s, limits.burst_s, now_s)
            may_owe = rate_per_s * limits.burst_s / self.routers if resumed else 0.0
            left = part.balance + may_owe - (self.waiting[tenant] if limit == "tokens_per_s" else 0)
            if left <= 0:
                self.refused[limit] += 1
                raise _refusal(tenant, limit, rate_per_s, -left * self.routers / rate_per_s)
        self._spend(tenant, "requests_per_s", 1.0, now_s)
        return is_new and tenant in self._parts

    def spend(self, tenant: str, tokens: int, now_s: float) -> None:
        """What a request took, once that is known: nobody is refused for it any more."""
        if tokens:
            self._spend(tenant, "tokens_per_s", tokens, now_s)

    def waits(self, tenant: str, tokens: int) -> None:
        """So many more of them wait for a slot. Below 0: no more, whatever came of it."""
        self.waiting[tenant] += tokens
        if not self.waiting[tenant]:
            del self.waiting[tenant]

    def tenants(self) -> list[str]:
        """Whose buckets are not full, as far as this router knows."""
        return list(self._parts)

    def to_tell(self, tenants: Iterable[str], now_s: float) -> list[Spent]:
        """What these have spent since, and of whom there is something to be known. `told` or `not_told` follows."""
        spent = []
        known = [tenant for tenant in tenants if tenant in self._parts]
        for tenant in known:
            limits, parts = self.limits_of(tenant), self._parts[tenant]
            rates = dict(_rates(limits))
            for limit in [limit for limit in parts if limit not in rates]:
                # The operator's file has changed.
                del parts[limit]
            for limit in parts:
                part = self._part(tenant, limit, rates[limit], limits.burst_s, now_s)
                burst = rates[limit] * limits.burst_s
                missing = max(0.0, burst / self.routers - part.balance)
                self._number_spent(part, missing)
                if part.telling or missing or not part.is_heard:
                    spent.append(Spent(tenant, limit, rates[limit], burst, part.telling, part.number))
        told = {each.tenant for each in spent}
        for tenant in [tenant for tenant in known if tenant not in told]:
            del self._parts[tenant]
        return spent

    def told(self, spent: Sequence[Spent], levels: Iterable[float], now_s: float) -> None:
        """levels: what each bucket has, of all routers, after that; below 0 it owes."""
        for each, level in zip(spent, levels, strict=True):
            part = self._parts.get(each.tenant, {}).get(each.limit)
            if part is not None:
                part.balance, part.since_s = level / self.routers - part.untold, max(now_s, part.since_s)
                part.telling, part.is_behind, part.is_heard = 0.0, False, True

    def not_told(self, spent: Sequence[Spent]) -> None:
        """Redis did not answer, and may have taken it all the same: it is told again by its number."""
        for each in spent:
            part = self._parts.get(each.tenant, {}).get(each.limit)
            if part is not None:
                part.is_behind = True

    def check_invariants(self) -> None:
        assert len(self._parts) <= _MOST_TENANTS, "more tenants are known than may be"
        assert all(tokens > 0 for tokens in self.waiting.values()), "nobody waits, and is counted"
        for parts in self._parts.values():
            assert all(part.is_behind or not part.telling for part in parts.values()), "a report is on its way"

    def _number_spent(self, part: _Part, missing: float) -> None:
        if part.is_behind:
            # What was spent meanwhile was this router's part of the rate, and only what is owed of it still counts.
            owed = min(part.telling + part.untold, missing)
            part.telling = min(part.telling, owed)
            part.untold = owed - part.telling
        if not part.telling:
            self._number += 1
            part.number, part.telling, part.untold = self._number, part.untold, 0.0

    def _spend(self, tenant: str, limit: Limit, amount: float, now_s: float) -> None:
        limits = self.limits_of(tenant)
        rate_per_s = getattr(limits, limit)
        if rate_per_s is None:
            return
        part = self._part(tenant, limit, rate_per_s, limits.burst_s, now_s)
        part.balance = max(part.balance - amount, -MOST_DEBT_S * rate_per_s / self.routers)
        part.untold += amount

    def _part(self, tenant: str, limit: Limit, rate_per_s: float, burst_s: float, now_s: float) -> _Part:
        """As it stands now. A bucket of which nothing is known is full."""
        full = rate_per_s * burst_s / self.routers
        parts = self._parts.setdefault(tenant, {})
        self._parts.move_to_end(tenant)
        if len(self._parts) > _MOST_TENANTS:
            self._parts.popitem(last=False)
        part = parts.get(limit)
        if part is None:
            part = parts[limit] = _Part(full, now_s)
        filled = max(0.0, now_s - part.since_s) * rate_per_s / self.routers
        part.balance, part.since_s = min(full, part.balance + filled), max(now_s, part.since_s)
        return part


def _rates(limits: TenantLimits) -> Iterator[tuple[Limit, float]]:
    for limit in LIMITS:
        rate_per_s = getattr(limits, limit)
        if rate_per_s is not None:
            yield limit, rate_per_s


def _refusal(tenant: str, limit: Limit, rate_per_s: float, wait_s: float) -> OverloadedError:
    wait_s = max(min(wait_s, MOST_DEBT_S), 0.001)
    return OverloadedError(
        f"the tenant `{tenant}` has had its {_WORDS[limit]}: {limit} is {rate_per_s:g} over all routers; come back in "
        f"{wait_s:.3g} s",
        retry_after_ms=max(1, round(wait_s * 1000)),
    )
