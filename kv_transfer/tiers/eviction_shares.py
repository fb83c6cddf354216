"""Whose block leaves a tier next: of the tenant that has most for its weight, among those that claim room.

A lazy heap of the tenants that claim room, an order of eviction for each, and two that cut across them:
    claimed      leaves of a tenant that claims room (`kv_transfer.tiers.owners`): its own order
    unclaimed    leaves of the others, which asked too long ago, and of nobody
    unproven     leaves of all tenants that were asked for once only, and are no turn of a conversation
The tenant with most blocks for its weight gives its coldest leaf, or a colder unclaimed one goes. Before a leaf that
was asked for again, an unproven one goes that is colder: room is no share of anybody's for what never comes again. So a
tenant fills what nobody else claims, gives it back block by block once others ask, and keeps what it asks for again as
long as another has more for its weight. Without tenants all is unclaimed.

A tenant that has come to claim nothing takes its leaves along, a few with each eviction, and its own order is asked
beside the unclaimed ones until then; the next such tenant claims room as long. So an eviction costs O(log n) here as
well, but for a list of the leaves of a tenant whose claim ends.
Source: min-funding revocation, as in Waldspurger, "Memory Resource Management in VMware ESX Server", OSDI 2002.
"""

import heapq
from collections.abc import Callable
from itertools import count

from kv_transfer.blocks import BlockHash, Tier
from kv_transfer.tiers.eviction_order import EvictionOrder
from kv_transfer.tiers.eviction_policies import EvictionPolicy, Priority
from kv_transfer.tiers.owners import Owner
from kv_transfer.tiers.prefix_runs import Node
from kv_transfer.tiers.radix_tree import RadixTree

# As many are moved in the time of a few evictions.
TAKEN_ALONG = 16
# What it has for its weight, negative; a number that makes entries differ; the tenant.
_Entry = tuple[float, int, Owner]


class EvictionShares:
    """Of one tier of a tree. `is_referenced(id)`: whether anything but the tree holds this block or slot.

    is_proven(hash): whether a block was asked for more than once, or goes on from the end of an earlier prompt.
    taken_along: leaves that an eviction takes along, of a tenant whose claim has ended.
    """

    def __init__(
        self,
        tree: RadixTree,
        tier: Tier,
        policy: EvictionPolicy,
        is_referenced: Callable[[int], bool],
        is_proven: Callable[[BlockHash], bool],
        taken_along: int = TAKEN_ALONG,
    ) -> None:
        self._tree = tree
        self._tier = tier
        self._policy = policy
        self._is_referenced = is_referenced
        self._is_proven = is_proven
        self._claimants = claimants = tree.owners.claimants(tier)
        self._unclaimed = EvictionOrder(tree, tier, policy, is_referenced, lambda node: node.owner not in claimants)
        self._unproven = EvictionOrder(tree, tier, policy, is_referenced, lambda node: not is_proven(node.hashes[-1]))
        # Of every tenant with blocks in the tier, whether it claims room or not.
        self._orders: dict[Owner, EvictionOrder] = {}
        # Of those that claim room and may have a leaf that may leave, at least what they have for their weight.
        self._heap: list[_Entry] = []
        self._queued: dict[Owner, _Entry] = {}
        self._sequence = count()
        self._taken_along = taken_along
        # Whose claim has ended while not all of its leaves lie among the unclaimed ones: those that do not.
        self._ending: Owner | None = None
        self._left_behind: list[Node] = []

    def became_leaf(self, node: Node) -> None:
        """To be called for every run that may be a leaf of the tier now, and that has got longer."""
        owner = node.owner
        if owner is not self._tree.owners.nobody:
            self._order_of(owner).became_leaf(node)
            self._unproven.became_leaf(node)
            if owner in self._claimants:
                self._push(owner)
                return
        self._unclaimed.became_leaf(node)

    def became_free(self, identity: int) -> None:
        """To be called for every block or slot that only the tree refers to now."""
        node = self._tree.node_of(self._tier, identity)
        if node is not None and self.tail(node) == identity:
            self.became_leaf(node)

    def asked(self, owner: Owner) -> None:
        """It claims room from now on; its weight may be another one."""
        if owner is self._ending:
            self._end(None, [])
        if owner in self._orders:
            self._push(owner)

    def forget(self, owner: Owner) -> None:
        """It owns nothing any more."""
        if owner is self._ending:
            self._end(None, [])
        self._orders.pop(owner, None)
        self._queued.pop(owner, None)
        self._tidy()

    def coldest(self) -> Node | None:
        """The leaf whose tail leaves next. None: every one is referenced, or there is none."""
        giving = self._giving(self._with_most())
        if len(giving) == 1:
            return giving[0].coldest()
        coldest = [order.coldest() for order in giving]
        return min((each for each in coldest if each is not None), key=self._place, default=None)

    def leaves(self) -> list[tuple[Priority, Node]]:
        """The leaves that leave next while who has most stays the same, coldest first. O(n log n)."""
        giving = self._giving(self._with_most())
        if len(giving) == 1:
            return giving[0].leaves()
        priorities = {node: priority for order in giving for priority, node in order.leaves()}
        return [(priorities[node], node) for node in sorted(priorities, key=self._place)]

    def is_owed(self, block_hash: BlockHash, owner: Owner, blocks: int) -> bool:
        """Whether room for this block, after so many more of its owner's, is a share of the owner's: it will have no
        more than who gives it, for its weight. Of a block that was asked for again."""
        most = self._with_most()
        if most is None or most is owner or owner not in self._claimants or not self._is_proven(block_hash):
            return False
        tier = self._tier
        return (owner.blocks[tier] + blocks + 1) * most.weight <= (most.blocks[tier] - 1) * owner.weight

    def is_for_others(self, owner: Owner) -> bool:
        """Whether this owner claims room, and others do so as well."""
        return owner in self._claimants and len(self._claimants) > 1

    def tail(self, node: Node) -> int:
        return self._unclaimed.tail(node)

    def free_blocks(self, node: Node) -> int:
        """How many blocks at the end of a leaf may leave one after the other."""
        return self._unclaimed.free_blocks(node)

    def check_invariants(self) -> None:
        self._unclaimed.check_invariants()
        self._unproven.check_invariants()
        for owner, order in self._orders.items():
            assert owner in self._tree.owners, "an order of a tenant that is forgotten"
            order.check_invariants()
        assert self._ending is None or self._ending in self._orders, "a tenant that is forgotten leaves leaves behind"
        assert self._ending not in self._claimants, "a tenant that claims room leaves leaves behind"
        assert self._queued.keys() <= self._orders.keys(), "a tenant without an order is asked for a leaf"
        assert len(self._heap) <= 4 * len(self._orders) + 65, "entries of tenants pile up"
        assert all(
            -entry[0] >= owner.load(self._tier) for owner, entry in self._queued.items() if owner in self._claimants
        ), "a tenant has more than it stands for"

    def _giving(self, most: Owner | None) -> list[EvictionOrder]:
        """The orders of which the coldest leaf of all leaves next. most: who has most for its weight, if anybody."""
        giving = [self._unclaimed]
        if self._ending is not None:
            giving.append(self._orders[self._ending])
        if most is None:
            return giving
        giving.append(self._orders[most])
        theirs = self._orders[most].coldest()
        assert theirs is not None
        return [*giving, self._unproven] if self._is_proven(theirs.hashes[-1]) else giving

    def _place(self, node: Node) -> tuple[int, Priority]:
        group, priority = self._unclaimed.place(node)
        return self._policy.groups().index(group), priority

    def _order_of(self, owner: Owner) -> EvictionOrder:
        order = self._orders.get(owner)
        if order is None:
            order = self._orders[owner] = EvictionOrder(
                self._tree, self._tier, self._policy, self._is_referenced, runs=lambda: owner.runs
            )
        return order

    def _let_idle_ones_go(self) -> None:
        """A few leaves, however many lie there."""
        for _ in range(self._taken_along):
            if not self._left_behind:
                owner = self._tree.owners.fallen_idle(self._tier, self._tree.blocks[self._tier])
                order = self._orders.get(owner) if owner is not None else None
                self._end(owner if order is not None else None, order.known() if order is not None else [])
                if owner is None:
                    return
            if self._left_behind:
                self._unclaimed.became_leaf(self._left_behind.pop())

    def _end(self, owner: Owner | None, leaves: list[Node]) -> None:
        self._ending, self._left_behind = owner, leaves

    def _with_most(self) -> Owner | None:
        """The tenant that claims room and has most for its weight, of those with a leaf that may leave."""
        if not self._orders:
            return None
        self._let_idle_ones_go()
        while self._heap:
            entry = self._heap[0]
            owner = entry[2]
            if self._queued.get(owner) is entry:
                if owner in self._claimants and -entry[0] > owner.load(self._tier):
                    del self._queued[owner]
                    self._push(owner)
                elif owner in self._claimants and self._orders[owner].coldest() is not None:
                    return owner
                else:
                    # It comes back when it asks, or with the next leaf.
                    del self._queued[owner]
            if self._heap and self._heap[0] is entry:
                heapq.heappop(self._heap)
        return None

    def _push(self, owner: Owner) -> None:
        load, queued = owner.load(self._tier), self._queued.get(owner)
        if queued is not None and -queued[0] >= load:
            return
        entry = -load, next(self._sequence), owner
        self._queued[owner] = entry
        heapq.heappush(self._heap, entry)
        self._tidy()

    def _tidy(self) -> None:
        """Entries that stand for nothing any more go before they pile up."""
        if len(self._heap) > 4 * len(self._orders) + 64:
            self._heap = list(self._queued.values())
            heapq.heapify(self._heap)
