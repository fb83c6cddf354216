"""Whose prompts a step computes: tenants take turns by the tokens that were computed for them. Pure.

The lowest priority number goes first; of one priority the tenant with the fewest tokens for its weight, in virtual time
(`cluster_core.tenant_shares`); of one tenant what the policy says. A tenant that was kept waiting keeps its place. One
whose prompts were all computed, or that had none, comes anew with the next: where the others are.

Turns are of steps, and a prompt may need many. While tenants take turns what has begun keeps its blocks against
newcomers of its own priority: two prompts that do not fit together would take them from each other for ever.

While requests of several tenants or priorities are here, and for `LATELY_S` after that, steps are short: whoever comes
next waits for the one that runs. One token is no turn: it is a decode's, or what a pull leaves. Nor is what a request
computes that has begun to answer, however much that is.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import inf

from cluster_core.engine_jobs import TenantShare
from cluster_core.tenant_shares import Claimant, TenantShares
from prefill_worker.policies import Contender, by_priority

# After the last time that several were here.
LATELY_S = 10.0


class PromptTurns:
    """Told of each step, before it and after it."""

    def __init__(self) -> None:
        self._shares = TenantShares()
        # Who has something to compute in this step, and its weight.
        self._weights: dict[Claimant, float] = {}
        # To whom the step before could not give all that was asked for.
        self._kept_waiting: set[Claimant] = set()

    def order(self, by_policy: Sequence[Contender]) -> list[Contender]:
        """By priority, tenant, and then as it is given. A step begins."""
        self._come({_whose(each): each.tenant.part for each in by_policy if _has_turn(each)})
        ordered = list(by_policy)
        if len({each.tenant.tenant_id for each in by_policy}) > 1:
            ordered.sort(key=self._start)
        return by_priority(ordered)

    def begun(self, by_policy: Sequence[Contender]) -> list[Contender]:
        """Of those given to `order`, what keeps its blocks, as far as they fit together; who comes first, first."""
        # Also who waits for one token: it has no turn, and needs what it holds.
        waiting = {_whose(each) for each in by_policy if each.remaining_tokens and not each.decodes}
        tenants = Counter(whose.priority for whose in waiting)
        begun = [
            each for each in by_policy if each.held_blocks and each.remaining_tokens and tenants[each.priority] > 1
        ]
        return by_priority(begun)

    def computed(self, contenders: Iterable[Contender], tokens: Mapping[str, int]) -> None:
        """The step was carried out. tokens: by the name of a request."""
        had, self._kept_waiting = Counter[Claimant](), set()
        for each in contenders:
            whose, computed = _whose(each), tokens.get(each.request_id, 0)
            if whose not in self._weights or each.decodes:
                continue
            had[whose] += computed
            if each.remaining_tokens - computed > 1:
                self._kept_waiting.add(whose)
        self._charge(had)

    def computed_alone(self, whose: Claimant, weight: float, tokens: int) -> None:
        """A step without a plan, of the only one who is here. tokens: of prompts; without any it has no turn."""
        weights = {whose: weight} if tokens else {}
        self._come(weights)
        self._kept_waiting = set(weights)
        self._charge(dict.fromkeys(weights, tokens))

    def check_invariants(self) -> None:
        self._shares.check_invariants()
        assert self._shares.here == self._weights.keys(), "somebody has a turn who is not here"
        assert self._kept_waiting <= self._weights.keys(), "somebody waits who is not here"

    def _come(self, weights: dict[Claimant, float]) -> None:
        for whose in self._shares.here - weights.keys():
            self._shares.leaves(whose)
        for whose in weights.keys() - self._kept_waiting:
            self._shares.comes(whose)
        self._weights = weights

    def _charge(self, had: Mapping[Claimant, int]) -> None:
        for whose in sorted(had, key=self._shares.start):
            if had[whose]:
                self._shares.begins(whose, had[whose], self._weights[whose])

    def _start(self, each: Contender) -> float:
        return self._shares.start(_whose(each))


def _whose(each: Contender) -> Claimant:
    return Claimant(each.priority, each.tenant.tenant_id)


def _has_turn(each: Contender) -> bool:
    return each.remaining_tokens > 1 and not each.decodes


class Mix:
    """Of which tenants and priorities requests are here, whatever they wait for."""

    def __init__(self) -> None:
        self._requests: dict[str, tuple[Claimant, float]] = {}
        self._counts: Counter[Claimant] = Counter()
        self._mixed_s = -inf
        # Whether several are here, or were lately; as it was when `look` was last called.
        self.is_mixed = False

    @property
    def alone(self) -> tuple[Claimant, float] | None:
        """Who is here, with its weight, where it is the only one."""
        return next(iter(self._requests.values())) if len(self._counts) == 1 else None

    def came(self, name: str, priority: int, tenant: TenantShare) -> None:
        """A second time changes nothing."""
        if name not in self._requests:
            whose = Claimant(priority, tenant.tenant_id)
            self._requests[name] = whose, tenant.part
            self._counts[whose] += 1

    def left(self, name: str) -> None:
        """Likewise."""
        if name not in self._requests:
            return
        whose, _ = self._requests.pop(name)
        self._counts[whose] -= 1
        if not self._counts[whose]:
            del self._counts[whose]

    def look(self, now_s: float) -> None:
        """Between two steps."""
        if len(self._counts) > 1:
            self._mixed_s = now_s
        self.is_mixed = now_s - self._mixed_s < LATELY_S

    def check_invariants(self) -> None:
        assert self._counts == Counter(whose for whose, _ in self._requests.values()), "who is here is miscounted"
