"""What leaves a tier next: the tail of the leaf with the lowest priority, never a referenced block.

A heap of leaves for each group of the policy, lazy in both directions: a run that became a leaf is pushed, one that is
none any more is passed over when it comes up, and one whose priority has risen meanwhile is put back where it belongs.
So an access costs nothing here, and an eviction O(log n). Where priorities fall by themselves the heaps are built anew
once an epoch.
Source: HotPrefix section 3.3.1 and algorithm 1, corrected: locked runs are skipped, and finding nothing is an answer.
"""

import heapq
from collections.abc import Callable
from itertools import count

from kv_transfer.blocks import Tier
from kv_transfer.tiers.eviction_policies import EvictionPolicy, Priority
from kv_transfer.tiers.prefix_runs import Node
from kv_transfer.tiers.radix_tree import RadixTree

# Priority, a number that makes entries differ, the leaf, its group.
_Entry = tuple[Priority, int, Node, int]


class EvictionOrder:
    """Of one tier of a tree. `is_referenced(id)`: whether anything but the tree holds this block or slot.

    keeps: the runs that it orders; None: all that it is told of. runs: how many those are at most; None: all of the
    tree. Entries, those among them that mean nothing any more, are at most a few for each run that there was when it
    was last told of one.
    """

    def __init__(
        self,
        tree: RadixTree,
        tier: Tier,
        policy: EvictionPolicy,
        is_referenced: Callable[[int], bool],
        keeps: Callable[[Node], bool] | None = None,
        runs: Callable[[], int] | None = None,
    ) -> None:
        self._tree = tree
        self._tier = tier
        self._policy = policy
        self._is_referenced = is_referenced
        self._keeps = keeps
        self._runs = runs or (lambda: tree.nodes)
        self._heaps: dict[int, list[_Entry]] = {group: [] for group in policy.groups()}
        self._queued: dict[Node, _Entry] = {}
        self._entries = 0
        self._sequence = count()
        self._epoch = policy.epoch
        self._runs_then = 0

    def __len__(self) -> int:
        """Entries, with those that mean nothing any more."""
        return self._entries

    def became_leaf(self, node: Node) -> None:
        """To be called for every run that may be a leaf of the tier now."""
        if self._may_leave(node):
            self._push(node)
        self._look_at_size()

    def became_free(self, identity: int) -> None:
        """To be called for every block or slot that only the tree refers to now."""
        node = self._tree.node_of(self._tier, identity)
        if node is not None and self.tail(node) == identity:
            self.became_leaf(node)

    def coldest(self) -> Node | None:
        """The leaf whose tail leaves next. None: every one is referenced, or there is none."""
        if self._epoch != self._policy.epoch:
            self._epoch = self._policy.epoch
            self._rebuild()
        for group in self._policy.groups():
            heap = self._heaps[group]
            while heap:
                entry = heap[0]
                node = entry[2]
                if self._queued.get(node) is entry:
                    if not self._may_leave(node):
                        del self._queued[node]
                    elif self.place(node) == (group, entry[0]):
                        return node
                    else:
                        self._push(node)
                if heap and heap[0] is entry:
                    heapq.heappop(heap)
                    self._entries -= 1
        return None

    def leaves(self) -> list[tuple[Priority, Node]]:
        """All leaves that may leave, coldest first. For plans and people: O(n log n)."""
        turn = {group: index for index, group in enumerate(self._policy.groups())}
        found = []
        for node in self._queued:
            if self._may_leave(node):
                group, priority = self.place(node)
                found.append((turn[group], priority, node))
        return [(priority, node) for _, priority, node in sorted(found, key=lambda each: each[:2])]

    def known(self) -> list[Node]:
        """All leaves that may leave, and some that may not, in no order. O(n)."""
        return list(self._queued)

    def tail(self, node: Node) -> int:
        ids = node.ids[self._tier]
        assert ids is not None
        return ids[-1]

    def place(self, node: Node) -> tuple[int, Priority]:
        """Its group, and its priority there."""
        last = node.hashes[-1]
        return self._policy.group(last), self._policy.priority(last, len(node.hashes))

    def free_blocks(self, node: Node) -> int:
        """How many blocks at the end of a leaf may leave one after the other."""
        ids = node.ids[self._tier]
        assert ids is not None
        return next((index for index, each in enumerate(reversed(ids)) if self._is_referenced(each)), len(ids))

    def check_invariants(self) -> None:
        assert self._entries == sum(map(len, self._heaps.values())), "entries are miscounted"
        assert self._entries <= 4 * max(self._runs_then, self._runs()) + 65 + len(self._queued), "entries pile up"

    def _may_leave(self, node: Node) -> bool:
        ids = node.ids[self._tier]
        if ids is None or node.resident_children[self._tier] or self._is_referenced(ids[-1]):
            return False
        return self._keeps is None or self._keeps(node)

    def _push(self, node: Node) -> None:
        group, priority = self.place(node)
        queued = self._queued.get(node)
        if queued is not None and queued[0] == priority and queued[3] == group:
            return
        entry = priority, next(self._sequence), node, group
        self._queued[node] = entry
        heapq.heappush(self._heaps[group], entry)
        self._entries += 1

    def _look_at_size(self) -> None:
        """Runs that have left in another order's turn leave their entries here."""
        self._runs_then = self._runs()
        if self._entries > 4 * self._runs_then + 64:
            self._rebuild()

    def _rebuild(self) -> None:
        """Every leaf once. Leaves whose tail is referenced are left out: they come back when it is free."""
        leaves = self.leaves()
        self._queued.clear()
        self._entries = 0
        for heap in self._heaps.values():
            heap.clear()
        for _, node in leaves:
            self._push(node)
