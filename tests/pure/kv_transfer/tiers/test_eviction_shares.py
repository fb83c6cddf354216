"""Who gives up a block, by scenario; what is forgotten, and how much work it is."""

import random
from collections import Counter

from cluster_core.engine_jobs import TenantShare
from kv_transfer.blocks import BlockHash, Tier
from kv_transfer.tiers.eviction_policies import LeastRecentlyUsed
from kv_transfer.tiers.eviction_shares import EvictionShares
from kv_transfer.tiers.owners import Owners
from kv_transfer.tiers.radix_tree import RadixTree
from tests.counting import Number, lines_run, looks_at


class Forest:
    """Prompts of one block on the device, each asked for and cached by its tenant in turn."""

    def __init__(self, turnovers: int = 4) -> None:
        self.policy = LeastRecentlyUsed()
        self.owners = Owners(turnovers)
        self.tree = RadixTree(
            lambda node, tier: self.shares.became_leaf(node) if tier is Tier.DEVICE else None, owners=self.owners
        )
        self.shares = EvictionShares(
            self.tree, Tier.DEVICE, self.policy, lambda block: False, lambda block_hash: self.asked[block_hash] > 1
        )
        self.asked: Counter[BlockHash] = Counter()
        self.owners.on_gone = self.shares.forget

    def ask(self, number: int, tenant: TenantShare) -> None:
        owner = self.owners.asked(tenant)
        if owner is not None:
            self.shares.asked(owner)
        self.policy.accessed([number])
        self.asked[number] += 1
        self.tree.insert(Tier.DEVICE, [number], 0, [number], tenant)

    def evict(self) -> str:
        """Whose block it was."""
        node = self.shares.coldest()
        assert node is not None
        owner = node.owner.tenant_id
        self.tree.remove(Tier.DEVICE, self.shares.tail(node))
        return owner

    def blocks(self) -> dict[str, int]:
        owners = {node.owner for node in self.tree.runs(Tier.DEVICE)}
        return {owner.tenant_id: owner.blocks[Tier.DEVICE] for owner in owners}


def test_a_tenant_fills_all_that_nobody_else_asks_for_and_gives_back_half_of_it() -> None:
    forest = Forest()
    for number in range(100):
        forest.ask(number, TenantShare("flood"))
    for number in range(100, 160):
        assert forest.evict() == "flood" or forest.blocks()["flood"] <= 51
        forest.ask(number, TenantShare("other"))
    assert abs(forest.blocks()["flood"] - forest.blocks()["other"]) <= 1


def test_shares_go_by_weight() -> None:
    forest, numbers = Forest(), iter(range(10_000))
    tenants = [TenantShare("one"), TenantShare("three", 3.0)]
    for turn in range(1000):
        if turn >= 100:
            forest.evict()
        forest.ask(next(numbers), tenants[turn % 2])
    assert abs(forest.blocks()["one"] - 25) <= 1


def test_a_flood_takes_none_of_the_blocks_of_who_has_less() -> None:
    """Least recently used, which alone would keep nothing of the other one."""
    forest = Forest()
    for number in range(10):
        forest.ask(number, TenantShare("small"))
    for number in range(10, 100):
        forest.ask(number, TenantShare("flood"))
    for number in range(100, 1000):
        assert forest.evict() == "flood"
        forest.ask(number, TenantShare("flood"))
        if not number % 100:
            forest.ask(0, TenantShare("small"))
    assert forest.blocks() == {"small": 10, "flood": 90}


def test_what_was_asked_for_once_goes_before_what_the_largest_has_asked_for_again() -> None:
    forest = Forest()
    for number in range(10):
        forest.ask(number, TenantShare("visitor"))
    for _ in range(2):
        for number in range(10, 100):
            forest.ask(number, TenantShare("regular"))
    assert [forest.evict() for _ in range(11)] == [*["visitor"] * 10, "regular"]


def test_what_the_largest_has_asked_for_once_goes_first() -> None:
    forest = Forest()
    for number in range(10):
        forest.ask(number, TenantShare("small"))
    for number in range(10, 100):
        forest.ask(number, TenantShare("flood"))
    assert {forest.evict() for _ in range(50)} == {"flood"}


def test_who_asks_for_nothing_while_the_tier_is_filled_anew_so_often_keeps_nothing_against_others() -> None:
    forest = Forest(turnovers=2)
    for number in range(10):
        forest.ask(number, TenantShare("gone"))
    for number in range(10, 100):
        forest.ask(number, TenantShare("stays"))
    lost = []
    for number in range(100, 400):
        if forest.evict() == "gone":
            lost.append(number)
        forest.ask(number, TenantShare("stays"))
    # It asked last when 9 had come; 200 more are twice as many as there are.
    assert lost == [*range(209, 219)]
    assert len(forest.owners) == 1


def test_an_eviction_takes_little_more_work_among_many_leaves_of_many_tenants() -> None:
    def work(leaves: int, tenants: int) -> float:
        """For each that leaves: lines of Python, and priorities that the heaps compare."""
        forest = Forest()
        numbers = list(range(leaves))
        random.Random(1).shuffle(numbers)
        for number in numbers:
            forest.ask(number, TenantShare(str(number % tenants)))
        priority = forest.policy.priority
        # Its priorities are numbers that count how often they are compared.
        forest.policy.priority = lambda block_hash, length_blocks: Number(  # type: ignore[method-assign]
            priority(block_hash, length_blocks)
        )

        def half_leave() -> None:
            for _ in range(leaves // 2):
                forest.evict()

        looks: list[int] = []
        lines = lines_run(lambda: looks.append(looks_at(half_leave)))
        return (lines + looks[0]) / (leaves // 2)

    small = work(100, 1)
    # The heaps are less than twice as deep.
    assert work(600, 1) < 2 * small
    assert work(600, 30) < 2 * small
    assert work(600, 200) < 2 * small


def test_the_end_of_a_claim_costs_no_eviction_much_and_its_leaves_go_as_before() -> None:
    def most_work(leaves: int) -> int:
        """Lines of Python of the dearest eviction, while a tenant's claim ends and all of its leaves leave."""
        forest = Forest(turnovers=1)
        for number in range(leaves):
            forest.ask(number, TenantShare("gone"))
        work, left, numbers = [], Counter[str](), iter(range(leaves, 10_000))
        while forest.blocks().get("gone"):
            forest.ask(next(numbers), TenantShare("stays"))
            work.append(lines_run(lambda: left.update([forest.evict()])))
        # They are the coldest of what nobody claims: nothing else leaves, once it is so.
        assert left["gone"] == leaves and left["stays"] <= leaves
        return max(work)

    assert most_work(400) < 2 * most_work(100)


def test_tenants_that_come_and_go_leave_nothing_behind() -> None:
    forest = Forest()
    for number in range(1000):
        if number >= 20:
            forest.evict()
        forest.ask(number, TenantShare(f"tenant {number // 3}"))
        forest.shares.check_invariants()
    assert len(forest.owners) <= 20


def test_what_stood_for_tenants_that_are_gone_does_not_pile_up() -> None:
    forest = Forest()
    for number in range(200):
        forest.ask(number, TenantShare(f"tenant {number % 40}"))
    for block in range(200):
        forest.tree.remove(Tier.DEVICE, block)
        forest.shares.check_invariants()
    assert not forest.blocks()
