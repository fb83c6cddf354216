"""One worker's cached prefixes over two tiers: who leaves the device, who is worth a copy, who is brought back.

The core of the host tier, the same online and in replays: told what happens to blocks, it answers what to do, and it
moves no bytes. Who owns what when:
    device block            the pool; the tree refers to it while its hash is published
    host slot               the tree, once a copy has landed in it
    copy out under way      device block and slot both referenced by the copy; the slot is in no tree yet
    load under way          slots and device blocks referenced by the load; on the device nothing is published yet
    promotion under way     as a load, without a request; its slots are matched by nobody until it has landed
A copy that fails gives back what it held and changes nothing else.

Sources: HotPrefix sections 3.3 and 3.4, algorithms 1 and 2, as corrected in the project's notes on the paper.
"""

from collections import OrderedDict
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from kv_transfer.blocks import BlockHash, Tier
from kv_transfer.tiers.block_references import BlockReferences
from kv_transfer.tiers.eviction_order import EvictionOrder
from kv_transfer.tiers.eviction_policies import EvictionPolicy
from kv_transfer.tiers.hotness import HotnessTracker
from kv_transfer.tiers.radix_tree import Match, Node, RadixTree

# How hot blocks are is remembered for so many that were asked for and are nowhere, as those of waiting requests.
MOST_AWAITED = 2**17


class Admission(StrEnum):
    """What is copied to host memory."""

    NONE = "none"
    EVERYTHING = "everything"
    SELECTIVE = "selective"


class Refusal(StrEnum):
    """Why a device block was not copied to host memory."""

    FREQUENCY = "frequency"
    UNPROMISING = "unpromising"
    COLDER_THAN_HOST = "colder_than_host"
    HOST_LOCKED = "host_locked"


@dataclass(frozen=True, slots=True)
class TierRules:
    """frequency_threshold: accesses before a block may be worth a copy (selective only).

    promotion_pause: while promotions are in vain, one in so many prefills is looked for at most; 0: one in each.
    """

    admission: Admission = Admission.SELECTIVE
    frequency_threshold: int = 2
    promotion: bool = True
    promotion_blocks: int = 64
    promotion_pause: int = 1024


@dataclass(frozen=True, slots=True)
class CopyOut:
    """Device blocks to host slots: blocks `first` and following of the prefix `hashes`, which ends with the last."""

    hashes: tuple[BlockHash, ...]
    first: int
    blocks: tuple[int, ...]
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Promotion:
    """Host slots to as many device blocks that the caller takes from the pool, for blocks `first` and following."""

    hashes: tuple[BlockHash, ...]
    first: int
    slots: tuple[int, ...]


@dataclass(slots=True)
class TierCounters:
    """Blocks since the start, unless the name says otherwise.

    prompt_tokens: of requests that have begun; device_hit_tokens, host_hit_tokens: what of them was not computed.
    copied_back: promotions among it. used, wasted: promoted blocks that were asked for before they left the device, and
    that were not. copy_out_s, copy_back_s: what the copies in the background took, all workers of the engine together;
    timed: blocks of those copies.
    refused: offers of a prefix to host memory that ended at a block which was refused.
    """

    prompt_tokens: int = 0
    device_hit_tokens: int = 0
    host_hit_tokens: int = 0
    copied_out: int = 0
    copied_back: int = 0
    copies_failed: int = 0
    copy_out_s: float = 0.0
    copy_back_s: float = 0.0
    timed: int = 0
    promoted: int = 0
    promotions_used: int = 0
    promotions_wasted: int = 0
    evicted_device: int = 0
    evicted_host: int = 0
    refused: dict[Refusal, int] = field(default_factory=lambda: dict.fromkeys(Refusal, 0))


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


class PrefixTiers:
    """See the module. `is_referenced(block)`: whether a request or a copy holds this device block.

    `on_host_change(hashes, there)` is told of blocks that have come to host memory (`there`) or left it.
    """

    def __init__(
        self,
        policy: EvictionPolicy,
        tracker: HotnessTracker,
        rules: TierRules,
        host_slots: int,
        is_referenced: Callable[[int], bool],
    ) -> None:
        self.tree = RadixTree(self._became_leaf, self._forget, lambda hashes, there: self.on_host_change(hashes, there))
        self.on_host_change: Callable[[Sequence[BlockHash], bool], None] = lambda hashes, there: None
        self.counters = TierCounters()
        self.slots = BlockReferences(host_slots)
        self.policy = policy
        self.tracker = tracker
        self._rules = rules
        self._orders = {
            Tier.DEVICE: EvictionOrder(self.tree, Tier.DEVICE, policy, is_referenced),
            Tier.HOST: EvictionOrder(self.tree, Tier.HOST, policy, lambda slot: self.slots.count(slot) > 1),
        }
        self._copying: dict[int, BlockHash] = {}
        self._promoting: set[int] = set()
        # Promoted, and not asked for since.
        self._promoted: set[BlockHash] = set()
        self._pace = _Pace(rules.promotion_pause)
        self._awaited: OrderedDict[BlockHash, None] = OrderedDict()

    # What happens to prompts and device blocks.

    def accessed(self, hashes: Sequence[BlockHash], first_depth: int = 0) -> None:
        """A prompt asks for these blocks, `first_depth` blocks deep: each counts once a request, whatever hits."""
        self.tracker.accessed(hashes, first_depth)
        self.policy.accessed(hashes)
        if self._promoted:
            used = self._promoted.intersection(hashes)
            self._promoted -= used
            self.counters.promotions_used += len(used)
        for each in self.tree.missing(hashes):
            self._awaited.pop(each, None)
            self._awaited[each] = None
        while len(self._awaited) > MOST_AWAITED:
            oldest, _ = self._awaited.popitem(last=False)
            if oldest not in self.tree:
                self._forget((oldest,))

    def cached(self, hashes: Sequence[BlockHash], first: int, blocks: Sequence[int]) -> list[int]:
        """Blocks `first` and following of a prefix lie in these device blocks. Returns those that add nothing."""
        return self.tree.insert(Tier.DEVICE, hashes, first, blocks)

    def freed(self, block: int) -> None:
        """A cached device block is referenced by nobody any more."""
        self._orders[Tier.DEVICE].became_free(block)

    def coldest_device_block(self) -> int | None:
        """The cached device block to give up next. None: all are referenced."""
        order = self._orders[Tier.DEVICE]
        node = order.coldest()
        return None if node is None else order.tail(node)

    def depth(self, block: int) -> int | None:
        """How many blocks of its prefix come before a device block. None: the tree does not count on it."""
        node = self.tree.node_of(Tier.DEVICE, block)
        if node is None:
            return None
        ids = node.ids[Tier.DEVICE]
        assert ids is not None
        return node.start + ids.index(block)

    def left_device(self, block: int) -> None:
        """The pool gives a block to somebody else, or forgets its hash."""
        before = self.tree.blocks[Tier.DEVICE]
        if self._promoted:
            self._wasted(block)
        given_up = self.tree.remove(Tier.DEVICE, block)
        self.counters.evicted_host += len(given_up)
        self.counters.evicted_device += before - self.tree.blocks[Tier.DEVICE]
        if given_up:
            self._release(given_up)

    def reset(self) -> None:
        """The model has changed: nothing that was computed is worth anything, copies under way among it.

        Nor may the caller publish what it computes or loads at this moment.
        """
        self._copying.clear()
        self._promoted.clear()
        self._release(self.tree.clear(Tier.DEVICE))
        self._release(self.tree.clear(Tier.HOST))

    # Host memory.

    def match(self, hashes: Sequence[BlockHash]) -> Match:
        """What is on the device, and what can be loaded from host memory behind it."""
        match = self.tree.match(hashes)
        if self._promoting and not self._promoting.isdisjoint(match.host):
            landed = next(index for index, slot in enumerate(match.host) if slot in self._promoting)
            del match.host[landed:]
        return match

    def worth_copying(
        self, hashes: Sequence[BlockHash], at_most: int = 2**30, unwritten: Container[int] = ()
    ) -> CopyOut | None:
        """What of a prefix that lies on the device should be copied to host memory now: at most so many blocks.

        unwritten: device blocks whose KV is not there yet. The slots are taken and referenced; to be followed by
        `copied_out` or `copy_failed`. The caller holds the device blocks until then.
        """
        if self._rules.admission is Admission.NONE or not hashes:
            return None
        first, blocks = self._not_in_host(hashes)
        del blocks[at_most:]
        # No room is made at the cost of the same prefix, whose other blocks this one needs or leads to.
        kept = self._in_host(hashes) if self.slots.free < len(blocks) else []
        self.hold(kept)
        slots: list[int] = []
        for index, block in enumerate(blocks, first):
            if block in unwritten:
                break
            refusal = self._refusal(hashes[index], index + 1)
            if refusal is not None:
                self.counters.refused[refusal] += 1
                break
            slot = self.slots.allocate(1)
            assert slot is not None
            slots += slot
        self._release(kept)
        if not slots:
            return None
        end = first + len(slots)
        self._copying.update(zip(slots, hashes[first:end], strict=True))
        return CopyOut(tuple(hashes[:end]), first, tuple(blocks[: len(slots)]), tuple(slots))

    def copied_out(self, copy: CopyOut) -> None:
        """The bytes have landed: from now on they can be loaded, unless there was a reset meanwhile."""
        self.counters.copied_out += len(copy.slots)
        if self._end_copy(copy):
            self._release(self.tree.insert(Tier.HOST, copy.hashes, copy.first, copy.slots))
        else:
            self._release(copy.slots)

    def copy_failed(self, copy: CopyOut) -> None:
        self.counters.copies_failed += len(copy.slots)
        self._end_copy(copy)
        self._release(copy.slots)

    def host_slots_of(self, hashes: Sequence[BlockHash], first: int, count: int) -> list[int]:
        """Where blocks `first` and following of a prefix lie in host memory; as many as do, at most `count`."""
        found: list[int] = []
        for node, length in self.tree.path(hashes[: first + count]):
            in_host = node.ids[Tier.HOST]
            if node.start + length <= first:
                continue
            if in_host is None:
                break
            found += in_host[max(0, first - node.start) : length]
        return found

    @property
    def free_slots(self) -> int:
        """Slots that are free, and those that a cached block would give up."""
        return self.slots.free + self.tree.blocks[Tier.HOST] - self.slots.shared

    def claim(self, slots: int) -> list[int] | None:
        """So many slots for another use; cached blocks give way, coldest first.

        None: they are not to be had; the blocks that have given way by then are gone.
        """
        order = self._orders[Tier.HOST]
        while self.slots.free < slots:
            coldest = order.coldest()
            if coldest is None:
                return None
            self._evict_host(order.tail(coldest))
        return self.slots.allocate(slots)

    def hold(self, slots: Sequence[int]) -> None:
        """A load reads these slots: they are not evicted until it lets go of them."""
        self.slots.refer(slots)

    def let_go(self, slots: Sequence[int], *, loaded: bool) -> None:
        """A load has ended."""
        self.counters.copied_back += len(slots) * loaded
        self._release(slots)

    def promotion(self, at_most: int = 2**30) -> Promotion | None:
        """The hottest host run whose parent is on the device, where colder device leaves can make room for it.

        Its first `at_most` blocks.

        To be asked after each prefill. To look takes O(runs of the tree), and what was promoted may leave unused: after
        either was in vain it pauses, for one prefill at first and then twice as many each time.
        Its slots are referenced; to be followed by `promoted` or `promotion_failed`. The caller holds the device blocks
        before `first`, or its pool might take them first; takes as many as are promoted from the pool, which gives the
        coldest; and publishes them once the bytes have landed.
        """
        if not self._rules.promotion or not self._pace.is_due(self.counters):
            return None
        promotion = self._find_promotion(min(at_most, self._rules.promotion_blocks))
        if promotion is None:
            self._pace.was_in_vain()
        return promotion

    def promoted(self, promotion: Promotion, published: Sequence[BlockHash]) -> None:
        """The bytes have landed, and the caller has published what nobody else had computed meanwhile."""
        self._promoting.difference_update(promotion.slots)
        self._promoted.update(filter(self.tree.__contains__, published))
        self.counters.promoted += len(published)
        self.let_go(promotion.slots, loaded=True)

    def promotion_failed(self, promotion: Promotion) -> None:
        self._promoting.difference_update(promotion.slots)
        self.counters.copies_failed += len(promotion.slots)
        self.let_go(promotion.slots, loaded=False)

    def check_invariants(self) -> None:
        self.tree.check_invariants()
        self.slots.check_invariants()
        in_tree = {slot for slot, _ in self.tree.items(Tier.HOST)}
        assert all(self.slots.count(slot) for slot in in_tree), "a slot in the tree is free"
        assert in_tree.isdisjoint(self._copying), "a slot is in the tree before its bytes have landed"
        assert all(self.slots.count(slot) for slot in (*self._copying, *self._promoting)), "a slot is free too early"
        assert len(self.tracker) <= len(self.tree) + len(self._awaited), "what is nowhere is not forgotten"

    # Inside.

    def _became_leaf(self, node: Node, tier: Tier) -> None:
        self._orders[tier].became_leaf(node)

    def _not_in_host(self, hashes: Sequence[BlockHash]) -> tuple[int, list[int]]:
        """The first blocks of a prefix that are on the device, and neither in host memory nor on their way there.

        They end before the next one that is.
        """
        copying = set(self._copying.values())
        first, blocks = 0, list[int]()
        for node, length in self.tree.path(hashes):
            on_device, in_host = node.ids
            if on_device is None:
                break
            for index in range(length if in_host is None else 0):
                if node.hashes[index] not in copying:
                    first = first if blocks else node.start + index
                    blocks.append(on_device[index])
                elif blocks:
                    return first, blocks
            if in_host is not None and blocks:
                break
        return first, blocks

    def _in_host(self, hashes: Sequence[BlockHash]) -> list[int]:
        found: list[int] = []
        for node, length in self.tree.path(hashes):
            found += (node.ids[Tier.HOST] or ())[:length]
        return found

    def _wasted(self, block: int) -> None:
        """A block is about to leave the device, perhaps promoted for nothing."""
        node = self.tree.node_of(Tier.DEVICE, block)
        if node is not None:
            ids = node.ids[Tier.DEVICE]
            assert ids is not None
            block_hash = node.hashes[len(ids) - 1 if ids[-1] == block else ids.index(block)]
            if block_hash in self._promoted:
                self._promoted.remove(block_hash)
                self.counters.promotions_wasted += 1

    def _end_copy(self, copy: CopyOut) -> bool:
        """Whether its bytes are worth anything: there was no reset since it began."""
        known = [self._copying.pop(slot, None) is not None for slot in copy.slots]
        return all(known)

    def _refusal(self, block_hash: BlockHash, length: int) -> Refusal | None:
        selective = self._rules.admission is Admission.SELECTIVE
        frequency = self.tracker.hotness(block_hash).frequency
        if selective and frequency < self._rules.frequency_threshold:
            return Refusal.FREQUENCY
        if selective and not self.policy.is_promising(block_hash):
            return Refusal.UNPROMISING
        while not self.slots.free:
            order = self._orders[Tier.HOST]
            coldest = order.coldest()
            if coldest is None:
                return Refusal.HOST_LOCKED
            if selective:
                theirs = self.policy.priority(coldest.hashes[-1], len(coldest.hashes))
                if theirs >= self.policy.priority(block_hash, length):
                    return Refusal.COLDER_THAN_HOST
            self._evict_host(order.tail(coldest))
        return None

    def _evict_host(self, slot: int) -> None:
        slots = [*self.tree.remove(Tier.HOST, slot), slot]
        self.counters.evicted_host += len(slots)
        self._release(slots)

    def _release(self, slots: Sequence[int]) -> None:
        freed = self.slots.release(slots)
        if len(freed) < len(slots):
            for slot in slots:
                self._orders[Tier.HOST].became_free(slot)

    def _forget(self, hashes: Sequence[BlockHash]) -> None:
        self.policy.forget(hashes)
        self.tracker.forget(hashes)

    def _find_promotion(self, at_most: int) -> Promotion | None:
        root = self._hottest_host_root(at_most)
        if root is None:
            return None
        slots = root.ids[Tier.HOST]
        assert slots is not None
        wanted = min(len(slots), at_most)
        priority = self.policy.priority(root.hashes[wanted - 1], wanted)
        order, room, ancestors = self._orders[Tier.DEVICE], 0, _ancestors(root)
        coldest = order.coldest()
        if coldest is None or self.policy.priority(coldest.hashes[-1], len(coldest.hashes)) >= priority:
            return None
        for coldness, leaf in order.leaves():
            if coldness >= priority or room >= wanted:
                break
            if leaf not in ancestors:
                room += order.free_blocks(leaf)
        if room < wanted:
            return None
        hashes = prefix_of(root)[: root.start + wanted]
        chosen = tuple(slots[:wanted])
        self.hold(chosen)
        self._promoting.update(chosen)
        return Promotion(tuple(hashes), root.start, chosen)

    def _hottest_host_root(self, at_most: int) -> Node | None:
        best: tuple[float, Node] | None = None
        for node in self.tree.host_roots():
            slots = node.ids[Tier.HOST]
            assert slots is not None
            wanted = min(len(slots), at_most)
            priority = self.policy.priority(node.hashes[wanted - 1], wanted)
            if best is not None and priority <= best[0]:
                continue
            if all(self.slots.count(slot) == 1 for slot in slots):
                best = priority, node
        return best[1] if best is not None else None


def prefix_of(node: Node) -> list[BlockHash]:
    """All hashes from the first block of the prefix to the end of the run."""
    runs = []
    each: Node | None = node
    while each is not None:
        runs.append(each.hashes)
        each = each.parent
    return [block_hash for run in reversed(runs) for block_hash in run]


def _ancestors(node: Node) -> set[Node]:
    found = set()
    each = node.parent
    while each is not None:
        found.add(each)
        each = each.parent
    return found
