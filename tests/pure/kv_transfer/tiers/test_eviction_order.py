"""The eviction order against a plain search for the coldest leaf, its bounds, and how long it takes."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kv_transfer.blocks import BlockHash, Tier
from kv_transfer.tiers.eviction_order import EvictionOrder
from kv_transfer.tiers.eviction_policies import LeastRecentlyUsed, Priority
from kv_transfer.tiers.prefix_runs import Node
from kv_transfer.tiers.radix_tree import RadixTree
from tests.counting import Number, lines_run, looks_at
from tests.examples import examples
from tests.planting import planted
from tests.pure.kv_transfer.tiers.test_radix_tree import Prefix, hashes_of
from tests.state_machines import expect_noticed

PROMPTS = st.lists(st.integers(1, 3), min_size=1, max_size=6).map(tuple)


class ScriptedPolicy:
    """Priorities and groups as the test says; `weight` times the length of the run comes on top."""

    def __init__(self, weight: float) -> None:
        self.epoch = 0
        self.weight = weight
        self.scores: dict[BlockHash, int] = {}
        self.members: dict[BlockHash, int] = {}
        self.first_group = 0

    def groups(self) -> Sequence[int]:
        return (self.first_group, 1 - self.first_group)

    def group(self, block_hash: BlockHash) -> int:
        return self.members.get(block_hash, 0)

    def priority(self, block_hash: BlockHash, length_blocks: int) -> Priority:
        return self.scores.get(block_hash, 0) + self.weight * length_blocks

    def is_promising(self, block_hash: BlockHash) -> bool:
        return True

    def accessed(self, hashes: Sequence[BlockHash]) -> None:
        for each in hashes:
            self.scores[each] = self.scores.get(each, 0) + 1

    def forget(self, hashes: Sequence[BlockHash]) -> None:
        return


class OrderMachine(RuleBasedStateMachine):
    """One tree, the order of both tiers. Within an epoch priorities rise only; length counts for or against a run."""

    @initialize(weight=st.sampled_from([0.0, 0.3, -0.3]))
    def start(self, weight: float) -> None:
        self.policy = ScriptedPolicy(weight)
        self.referenced: set[int] = set()
        self.tree = RadixTree(lambda node, tier: self.orders[tier].became_leaf(node))
        self.orders = {
            tier: EvictionOrder(self.tree, tier, self.policy, lambda identity: identity in self.referenced)
            for tier in Tier
        }
        self.next_id = 0

    @rule(prompt=PROMPTS, tier=st.sampled_from(Tier), referenced=st.booleans())
    def insert(self, prompt: Prefix, tier: Tier, referenced: bool) -> None:
        hashes = hashes_of(prompt)
        match = self.tree.match(hashes)
        first = len(match.device) if tier is Tier.DEVICE else 0
        ids = list(range(self.next_id, self.next_id + len(hashes) - first))
        self.next_id += len(ids)
        self.referenced.update(ids if referenced else ())
        refused = self.tree.insert(tier, hashes, first, ids)
        self.referenced.difference_update(refused if tier is Tier.HOST else ())

    @rule(prompt=PROMPTS)
    def access(self, prompt: Prefix) -> None:
        self.policy.accessed(hashes_of(prompt))

    @rule(prompt=PROMPTS)
    def refer(self, prompt: Prefix) -> None:
        match = self.tree.match(hashes_of(prompt))
        self.referenced.update(match.device + match.host)

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if self.referenced:
            freed = data.draw(st.lists(st.sampled_from(sorted(self.referenced)), unique=True))
            self.referenced.difference_update(freed)
            for each in freed:
                for tier in Tier:
                    self.orders[tier].became_free(each)

    @rule(tier=st.sampled_from(Tier), number=st.integers(1, 5))
    def evict(self, tier: Tier, number: int) -> None:
        for _ in range(number):
            node = self.orders[tier].coldest()
            if node is not None:
                self.tree.remove(tier, self.orders[tier].tail(node))

    @rule(data=st.data(), tier=st.sampled_from(Tier))
    def remove_any(self, data: st.DataObject, tier: Tier) -> None:
        there = sorted(identity for identity, _ in self.tree.items(tier))
        if there:
            self.tree.remove(tier, data.draw(st.sampled_from(there)))

    @rule(tier=st.sampled_from(Tier))
    def clear(self, tier: Tier) -> None:
        self.tree.clear(tier)

    @rule()
    def turn_the_groups(self) -> None:
        self.policy.first_group = 1 - self.policy.first_group

    @rule(prompt=PROMPTS, group=st.integers(0, 1), fall=st.integers(0, 5))
    def begin_an_epoch(self, prompt: Prefix, group: int, fall: int) -> None:
        for each in hashes_of(prompt):
            self.policy.members[each] = group
            self.policy.scores[each] = self.policy.scores.get(each, 0) - fall
        self.policy.epoch += 1

    def places(self, tier: Tier) -> list[tuple[int, Priority]]:
        places = []
        for node in self.tree.runs(tier):
            ids = node.ids[tier]
            assert ids is not None
            if node.is_leaf(tier) and ids[-1] not in self.referenced:
                places.append(self.place(node))
        return sorted(places)

    def place(self, node: Node) -> tuple[int, Priority]:
        turn = self.policy.groups().index(self.policy.group(node.hashes[-1]))
        return turn, self.policy.priority(node.hashes[-1], len(node.hashes))

    @invariant()
    def the_coldest_leaf_is_next(self) -> None:
        for tier, order in self.orders.items():
            places = self.places(tier)
            coldest = order.coldest()
            if coldest is None:
                assert not places, "nothing was found, though something may leave"
            else:
                assert order.tail(coldest) not in self.referenced
                assert coldest.is_leaf(tier)
                assert self.place(coldest) == places[0]
            leaves = order.leaves()
            assert [self.place(node) for _, node in leaves] == places
            assert [priority for priority, _ in leaves] == [priority for _, priority in places]

    @invariant()
    def entries_are_bounded_by_the_runs(self) -> None:
        for order in self.orders.values():
            order.check_invariants()


OrderMachine.TestCase.settings = examples(200, steps=40)
test_order_finds_what_a_plain_search_finds = OrderMachine.TestCase


@pytest.mark.parametrize(
    ("name", "wrong", "first_seed"),
    [
        ("became_free", lambda order, identity: None, 8),
        (
            "place",
            # Planted.
            lambda order, node: (order._policy.group(node.hashes[0]), order._policy.priority(node.hashes[0], 1)),
            0,
        ),
        ("_rebuild", lambda order: None, 28),
    ],
)
def test_machine_sees_planted_bugs(monkeypatch: pytest.MonkeyPatch, name: str, wrong: object, first_seed: int) -> None:
    planted(monkeypatch, EvictionOrder, name, wrong)
    expect_noticed(OrderMachine, first_seed=first_seed)


def forest(leaves: int) -> tuple[RadixTree, EvictionOrder, LeastRecentlyUsed]:
    """That many prompts of one block, asked for in random order."""
    policy = LeastRecentlyUsed()
    tree = RadixTree(lambda node, tier: order.became_leaf(node) if tier is Tier.DEVICE else None)
    order = EvictionOrder(tree, Tier.DEVICE, policy, lambda block: False)
    numbers = list(range(leaves))
    random.Random(1).shuffle(numbers)
    for number in numbers:
        policy.accessed([number])
        tree.insert(Tier.DEVICE, [number], 0, [number])
    return tree, order, policy


def test_runs_that_stay_hot_do_not_fill_the_order_when_the_tree_is_cleared_again_and_again() -> None:
    tree, order, policy = forest(100)
    for _ in range(50):
        tree.clear(Tier.DEVICE)
        policy.accessed(range(100))
        for number in range(100):
            tree.insert(Tier.DEVICE, [number], 0, [number])
    order.check_invariants()
    assert len(order) <= 4 * 100 + 65


def test_an_eviction_takes_little_more_work_among_many_leaves() -> None:
    def work(leaves: int) -> float:
        """For each that leaves: lines of Python, and priorities that the heap compares."""
        tree, order, policy = forest(leaves)
        policy.accessed(range(0, leaves, 2))
        priority = policy.priority
        # Its priorities are numbers that count how often they are compared.
        policy.priority = lambda block_hash, length_blocks: Number(  # type: ignore[method-assign]
            priority(block_hash, length_blocks)
        )
        # All entries get such priorities; by itself it runs at the policy's next epoch.
        order._rebuild()

        def half_leave() -> None:
            for _ in range(leaves // 2):
                node = order.coldest()
                assert node is not None
                tree.remove(Tier.DEVICE, order.tail(node))

        looks: list[int] = []
        lines = lines_run(lambda: looks.append(looks_at(half_leave)))
        return (lines + looks[0]) / (leaves // 2)

    # The heap is three times as deep at most.
    assert work(3000) < 2 * work(200)
