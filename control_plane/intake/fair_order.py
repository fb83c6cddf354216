"""Whose request is next among tenants that wait: tokens by weight, in virtual time. Pure.

Start-time fair queueing (Goyal, Vin, Cheng 1996), with tokens as length, as in virtual token counters (Sheng et al.
2024). Each tenant has a place in virtual time: where its next request starts. A request that begins moves its tenant on
by its tokens over the tenant's weight. Who is furthest back is next, and virtual time is where the last one that began
had started.

    two tenants that both wait     get tokens by their weights, but for one request of each
    a tenant that comes            starts at virtual time: what it did not use while it was away is no credit
    a tenant that leaves           keeps its place while that is ahead: coming and going does not help
    tokens that were guessed       are put right when the request has ended

Nobody starves: others move on with each request, and whoever waits does not.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

# A request is not less than that: it has a slot for as long as any.
LEAST_TOKENS = 64
# Tenants that have nothing here and are ahead; beyond, who left longest ago is forgotten.
_MOST_AWAY = 4096

WeightOf = Callable[[str], float]


@dataclass(slots=True)
class FairOrder:
    """Of requests of one priority. virtual: tokens for a weight of 1."""

    weight_of: WeightOf
    virtual: float = 0.0
    # Where the next request of each tenant starts; those who are not in it, at virtual time.
    _starts: dict[str, float] = field(default_factory=dict)
    # Of these, who has nothing here; who left last comes last.
    _away: OrderedDict[str, None] = field(default_factory=OrderedDict)

    def start(self, tenant: str) -> float:
        """The lowest is next."""
        return self._starts.get(tenant, self.virtual)

    def comes(self, tenant: str) -> None:
        """It waits, or begins, and had nobody waiting before."""
        self._away.pop(tenant, None)
        self._starts[tenant] = max(self.start(tenant), self.virtual)

    def begins(self, tenant: str, tokens: int) -> float:
        """A request of a tenant that has come. Its weight, by which it is put right at its end."""
        start, weight = self.start(tenant), self.weight_of(tenant)
        self.virtual = max(self.virtual, start)
        self._starts[tenant] = start + max(tokens, LEAST_TOKENS) / weight
        return weight

    def ended(self, tenant: str, guessed: int, tokens: int, weight: float) -> None:
        """One that began took so many tokens. weight: that it began with; the tenant's may be another one now."""
        if tenant in self._starts:
            more = max(tokens, LEAST_TOKENS) - max(guessed, LEAST_TOKENS)
            self._starts[tenant] += more / weight

    def leaves(self, tenant: str) -> None:
        """It has nothing here any more."""
        if self.start(tenant) <= self.virtual:
            self._starts.pop(tenant, None)
            return
        self._away[tenant] = None
        if len(self._away) > _MOST_AWAY:
            forgotten, _ = self._away.popitem(last=False)
            del self._starts[forgotten]

    def check_invariants(self) -> None:
        assert self._away.keys() <= self._starts.keys(), "somebody is away who is not known"
        assert len(self._away) <= _MOST_AWAY, "more are remembered than may be"
