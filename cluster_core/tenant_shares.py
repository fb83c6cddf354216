"""Whose work is next among tenants that wait: tokens by weight, in virtual time. Pure.

Start-time fair queueing (Goyal, Vin, Cheng 1996), with tokens as length, as in virtual token counters (Sheng et al.
2024). Each tenant has a place in virtual time: where its next work starts. Work that begins moves its tenant on by its
tokens over the tenant's weight. Who is furthest back is next, and virtual time is where the last one that began had
started. Work is a request where slots and places of a batch are given, and a tenant's part of a step where prompts are
computed.

    two tenants that both wait     get tokens by their weights, but for one work of each
    a tenant that comes            starts at virtual time: what it did not use while it was away is no credit
    a tenant that is alone         moves on, and virtual time with it: what it had then counts when others come
    a tenant that leaves           keeps its place while that is ahead: coming and going does not help
    tokens that were guessed       are put right when the request has ended
"""

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

# A request is not less than that: it has a slot, or a place, for as long as any.
LEAST_TOKENS = 64
# Tenants that have nothing here and are ahead; beyond, who left longest ago is forgotten.
_MOST_AWAY = 4096


class Claimant(NamedTuple):
    """Whose work waits in one line."""

    priority: int = 0
    tenant: str = ""

    @property
    def is_best_effort(self) -> bool:
        return self.priority > 0


@dataclass(slots=True)
class FairOrder:
    """Of the work of one priority. virtual: tokens for a weight of 1."""

    virtual: float = 0.0
    # Where the next work of each tenant starts; those who are not in it, at virtual time.
    _starts: dict[str, float] = field(default_factory=dict)
    # Of these, who has nothing here; who left last comes last.
    _away: OrderedDict[str, None] = field(default_factory=OrderedDict)

    def start(self, tenant: str) -> float:
        """The lowest is next."""
        return self._starts.get(tenant, self.virtual)

    def comes(self, tenant: str) -> None:
        """It waits, or begins, and had nothing waiting before."""
        self._away.pop(tenant, None)
        self._starts[tenant] = max(self.start(tenant), self.virtual)

    def begins(self, tenant: str, tokens: float, weight: float) -> None:
        """Work of a tenant that has come."""
        start = self.start(tenant)
        self.virtual = max(self.virtual, start)
        self._starts[tenant] = start + tokens / weight
        self._forget_who_is_not_ahead()

    def put_right(self, tenant: str, more_tokens: float, weight: float) -> None:
        """Work that began with that weight took so many tokens more, or fewer, than it was begun with."""
        if tenant in self._starts:
            self._starts[tenant] += more_tokens / weight

    def leaves(self, tenant: str) -> None:
        """It has nothing here any more."""
        if self.start(tenant) <= self.virtual:
            self._starts.pop(tenant, None)
            return
        self._away[tenant] = None
        if len(self._away) > _MOST_AWAY:
            self._forget_first()

    def check_invariants(self) -> None:
        assert self._away.keys() <= self._starts.keys(), "somebody is away who is not known"
        assert len(self._away) <= _MOST_AWAY, "more are remembered than may be"

    def _forget_who_is_not_ahead(self) -> None:
        """Of those who left longest ago: each is looked at once more than it is forgotten."""
        while self._away and self._starts[next(iter(self._away))] <= self.virtual:
            self._forget_first()

    def _forget_first(self) -> None:
        forgotten, _ = self._away.popitem(last=False)
        del self._starts[forgotten]


class TenantShares:
    """Of one pool: an order for each priority that has somebody here. In one order a tenant that comes would start
    behind all that higher priorities have had meanwhile."""

    def __init__(self) -> None:
        self._orders: dict[int, FairOrder] = {}
        self._here: set[Claimant] = set()
        # How many of each priority are here.
        self._sizes: Counter[int] = Counter()

    @property
    def here(self) -> set[Claimant]:
        """Who has come and not left; not to be changed."""
        return self._here

    def count(self, priority: int) -> int:
        """How many tenants are here with that priority."""
        return self._sizes[priority]

    def start(self, whose: Claimant) -> float:
        """Of one priority the lowest is next."""
        order = self._orders.get(whose.priority)
        return order.start(whose.tenant) if order is not None else 0.0

    def comes(self, whose: Claimant) -> None:
        """It has work that waits, or begins, and had none that waited before; it may be here all the same."""
        self._orders.setdefault(whose.priority, FairOrder()).comes(whose.tenant)
        if whose not in self._here:
            self._here.add(whose)
            self._sizes[whose.priority] += 1

    def begins(self, whose: Claimant, tokens: float, weight: float) -> None:
        """Work of somebody who is here."""
        self._orders[whose.priority].begins(whose.tenant, tokens, weight)

    def put_right(self, whose: Claimant, more_tokens: float, weight: float) -> None:
        """See `FairOrder`; of somebody who is here."""
        self._orders[whose.priority].put_right(whose.tenant, more_tokens, weight)

    def leaves(self, whose: Claimant) -> None:
        """It is here no more. The last one of a priority takes its order along: nobody is left to be ahead of."""
        self._here.remove(whose)
        self._sizes[whose.priority] -= 1
        self._orders[whose.priority].leaves(whose.tenant)
        if not self._sizes[whose.priority]:
            del self._sizes[whose.priority], self._orders[whose.priority]

    def check_invariants(self) -> None:
        assert self._orders.keys() == {each.priority for each in self._here}, "an order of nobody"
        assert self._sizes == Counter(each.priority for each in self._here), "who is here is miscounted"
        for order in self._orders.values():
            order.check_invariants()
