"""Tenants that always have requests waiting for a decode batch."""

from collections import Counter

from cluster_core.engine_jobs import TenantShare
from cluster_core.tenant_shares import LEAST_TOKENS
from decode_worker.batch_members import Reason
from decode_worker.batching import Batching
from tests.pure.decode_worker.batch_steps import BOUND_S, Threshold, hashes_of

# Of a prompt.
MANY = 8000


class Backlog:
    """Tenants that always have requests waiting, for a batch of few places; those of each share a prefix."""

    def __init__(self, weight_of: dict[str, float], tokens_of: dict[str, int], places: int = 3) -> None:
        self.batching = Batching(Threshold(99), BOUND_S)
        self.weight_of = weight_of
        self.tokens_of = tokens_of
        self.places = places
        self.running: list[str] = []
        self.now_s = 0.0
        self.number = 0
        # Virtual tokens of those that joined.
        self.had = dict.fromkeys(weight_of, 0.0)
        self.reasons: Counter[Reason] = Counter()

    def come(self, tenant: str, priority: int = 0) -> str:
        self.number += 1
        name = f"{tenant}.{self.number}"
        share = TenantShare(tenant, self.weight_of[tenant])
        self.batching.insert(
            name, hashes_of(tenant * 5 + str(self.number)), self.now_s, priority,
            tokens=self.tokens_of[tenant], tenant=share,
        )  # fmt: skip
        return name

    def step(self, *, by_arrival: bool = False) -> list[str]:
        """The one that runs longest ends; who joins."""
        for name in self.running[: 1 + len(self.running) - self.places]:
            self.running.remove(name)
            self.batching.gone(name)
        plan = self.batching.plan(self.now_s, self.places - len(self.running), by_arrival=by_arrival)
        self.batching.settle(plan, plan.request_ids, [], self.now_s)
        self.batching.shares.check_invariants()
        for each in plan.joining:
            tenant = each.member.tenant.tenant_id
            self.had[tenant] += max(LEAST_TOKENS, self.tokens_of[tenant]) / (self.weight_of[tenant] or 1.0)
            self.reasons[each.reason] += 1
        self.running += plan.request_ids
        self.now_s += 0.1
        return plan.request_ids

    def most(self, tenant: str) -> float:
        return max(LEAST_TOKENS, self.tokens_of[tenant]) / (self.weight_of[tenant] or 1.0)


def joins_after(tried: Backlog, name: str) -> int:
    """How many others join before this one."""
    others = 0
    for _ in range(1000):
        for joined in tried.step():
            if joined == name:
                return others
            others += 1
            tried.come(joined.partition(".")[0])
    raise AssertionError("it never joins")
