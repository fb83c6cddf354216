"""Which prefix of host memory comes back to the device before a prompt asks for it, how often, and whether that paid.

Who owns what when:
    under way   its slots are referenced, and no prompt matches them; its device blocks are the caller's
    landed      its blocks are unused until a prompt asks for them, wasted if they leave the device before
    failed      its slots are the tree's alone again
Source: HotPrefix section 3.4, algorithm 2; `docs/tiers.md` says where this differs: one run at a time, only if colder
leaves make room, and rarer while promotions are in vain.
"""

from collections.abc import Sequence

from kv_transfer.blocks import BlockHash, Tier
from kv_transfer.host_memory.block_references import BlockReferences
from kv_transfer.tiers.eviction_policies import EvictionPolicy
from kv_transfer.tiers.eviction_shares import EvictionShares
from kv_transfer.tiers.prefix_runs import Node, ancestors, prefix_of
from kv_transfer.tiers.radix_tree import RadixTree
from kv_transfer.tiers.tier_terms import Promotion, TierCounters, TierRules


class _Pace:
    """How many prefills to let pass between two promotions: twice as many each time that one was in vain."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._pause = self._next = 0
        self._used = self._wasted = 0

    def is_due(self, counters: TierCounters) -> bool:
        used, wasted = counters.promotions_used - self._used, counters.promotions_wasted - self._wasted
        if used or wasted:
            self._used, self._wasted = counters.promotions_used, counters.promotions_wasted
            if wasted > used:
                self.was_in_vain()
            else:
                self._pause = self._next = 0
        if self._pause:
            self._pause -= 1
            return False
        return True

    def was_in_vain(self) -> None:
        self._next = min(max(1, 2 * self._next), self._most)
        self._pause = max(self._pause, self._next)


class Promotions:
    """See the module. slots: of host memory. device_order: in which order leaves leave the device."""

    def __init__(
        self,
        tree: RadixTree,
        policy: EvictionPolicy,
        slots: BlockReferences,
        device_order: EvictionShares,
        rules: TierRules,
        counters: TierCounters,
    ) -> None:
        # Slots of promotions under way.
        self.reading: set[int] = set()
        # Blocks that have landed, and that no prompt has asked for since.
        self.unused: set[BlockHash] = set()
        self._tree = tree
        self._policy = policy
        self._slots = slots
        self._device_order = device_order
        self._rules = rules
        self._counters = counters
        self._pace = _Pace(rules.promotion_pause)

    def next(self, at_most: int) -> Promotion | None:
        """The hottest host run whose parent is on the device, where colder device leaves can make room for it.

        Its first `at_most` blocks; their slots are referenced. To be called after each prefill. To look takes O(runs of
        the tree), and what was promoted may leave unused: after either was in vain it pauses, for one prefill at first
        and then twice as many each time.
        """
        if not self._rules.promotion or not self._pace.is_due(self._counters):
            return None
        promotion = self._find(min(at_most, self._rules.promotion_blocks))
        if promotion is None:
            self._pace.was_in_vain()
        return promotion

    def landed(self, promotion: Promotion, published: Sequence[BlockHash]) -> None:
        """published: of its blocks those that nobody else had computed meanwhile. The caller lets go of the slots."""
        self.reading.difference_update(promotion.slots)
        self.unused.update(filter(self._tree.__contains__, published))
        self._counters.promoted += len(published)

    def failed(self, promotion: Promotion) -> None:
        """The caller lets go of the slots."""
        self.reading.difference_update(promotion.slots)
        self._counters.copies_failed += len(promotion.slots)

    def accessed(self, hashes: Sequence[BlockHash]) -> None:
        """A prompt asks for these blocks."""
        used = self.unused.intersection(hashes)
        self.unused -= used
        self._counters.promotions_used += len(used)

    def left_device(self, block: int) -> None:
        """A block is about to leave the device, perhaps promoted for nothing."""
        node = self._tree.node_of(Tier.DEVICE, block)
        if node is not None:
            ids = node.ids[Tier.DEVICE]
            assert ids is not None
            block_hash = node.hashes[len(ids) - 1 if ids[-1] == block else ids.index(block)]
            if block_hash in self.unused:
                self.unused.remove(block_hash)
                self._counters.promotions_wasted += 1

    def reset(self) -> None:
        """What has landed is worth nothing any more. What is under way still reads its slots."""
        self.unused.clear()

    def _find(self, at_most: int) -> Promotion | None:
        root = self._hottest_host_root(at_most)
        if root is None:
            return None
        slots = root.ids[Tier.HOST]
        assert slots is not None
        wanted = min(len(slots), at_most)
        priority = self._policy.priority(root.hashes[wanted - 1], wanted)
        order, room, before = self._device_order, 0, set(ancestors(root))
        coldest = order.coldest()
        if coldest is None or self._policy.priority(coldest.hashes[-1], len(coldest.hashes)) >= priority:
            return None
        for coldness, leaf in order.leaves():
            if coldness >= priority or room >= wanted:
                break
            if leaf not in before:
                room += order.free_blocks(leaf)
        if room < wanted:
            return None
        hashes = prefix_of(root)[: root.start + wanted]
        chosen = tuple(slots[:wanted])
        self._slots.refer(chosen)
        self.reading.update(chosen)
        return Promotion(tuple(hashes), root.start, chosen)

    def _hottest_host_root(self, at_most: int) -> Node | None:
        best: tuple[float, Node] | None = None
        for node in self._tree.host_roots():
            slots = node.ids[Tier.HOST]
            assert slots is not None
            wanted = min(len(slots), at_most)
            priority = self._policy.priority(node.hashes[wanted - 1], wanted)
            if best is not None and priority <= best[0]:
                continue
            if all(self._slots.count(slot) == 1 for slot in slots):
                best = priority, node
        return best[1] if best is not None else None
