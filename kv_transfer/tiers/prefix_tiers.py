"""One worker's cached prefixes over two tiers: what leaves the device, what is worth a copy, what is brought back.

The core of the host tier, the same online and in replays: it takes in what happens to blocks, answers what to do, and
moves no bytes. Who owns what when:
    device block            the pool; the tree refers to it while its hash is published
    host slot               the tree, once a copy has landed in it
    copy out under way      device block and slot both referenced by the copy; the slot is in no tree yet
    load under way          slots and device blocks referenced by the load; on the device nothing is published yet
    promotion under way     as a load, without a request (`kv_transfer.tiers.promotions`)
A copy that fails gives back what it held and changes nothing else.

Sources: HotPrefix sections 3.3 and 3.4, algorithms 1 and 2; `docs/tiers.md` says where this differs, and why.
"""

from collections import OrderedDict
from collections.abc import Callable, Container, Sequence

from cluster_core.engine_jobs import NOBODY, TenantShare
from kv_transfer.blocks import BlockHash, Tier
from kv_transfer.host_memory.block_references import BlockReferences
from kv_transfer.tiers.eviction_policies import EvictionPolicy
from kv_transfer.tiers.eviction_shares import EvictionShares
from kv_transfer.tiers.hotness import HotnessTracker
from kv_transfer.tiers.owners import Owner, Owners
from kv_transfer.tiers.prefix_runs import Match, Node
from kv_transfer.tiers.promotions import Promotions
from kv_transfer.tiers.radix_tree import RadixTree
from kv_transfer.tiers.tier_terms import Admission, CopyOut, Promotion, Refusal, TierCounters, TierRules

# Blocks that lie nowhere, as those of waiting requests: of how many it is remembered how hot they are.
MOST_AWAITED = 2**17


class PrefixTiers:
    """See the module.

    is_referenced(block): whether a request or a copy holds this device block. owners: whose blocks are.
    """

    def __init__(
        self,
        policy: EvictionPolicy,
        tracker: HotnessTracker,
        rules: TierRules,
        host_slots: int,
        is_referenced: Callable[[int], bool],
        owners: Owners | None = None,
    ) -> None:
        self.tree = RadixTree(
            self._became_leaf, self._forget, lambda hashes, there: self.on_host_change(hashes, there), owners
        )
        self.tree.owners.on_gone = self._forget_owner
        # Called with blocks that have come to host memory (`there`) or left it.
        self.on_host_change: Callable[[Sequence[BlockHash], bool], None] = lambda hashes, there: None
        self.counters = TierCounters()
        self.slots = BlockReferences(host_slots)
        self.policy = policy
        self.tracker = tracker
        self._rules = rules
        self._orders = {
            Tier.DEVICE: EvictionShares(self.tree, Tier.DEVICE, policy, is_referenced, self._is_proven),
            Tier.HOST: EvictionShares(
                self.tree, Tier.HOST, policy, lambda slot: self.slots.count(slot) > 1, self._is_proven
            ),
        }
        self._copying: dict[int, BlockHash] = {}
        self._promotions = Promotions(self.tree, policy, self.slots, self._orders[Tier.DEVICE], rules, self.counters)
        self._awaited: OrderedDict[BlockHash, None] = OrderedDict()
        # Blocks with which a prompt went on from the end of an earlier one, as a conversation does.
        self._continued: set[BlockHash] = set()

    # What happens to prompts and device blocks.

    def comes(self, hashes: Sequence[BlockHash]) -> None:
        """A prompt of these blocks will be `accessed`; to be called before any of them is cached for it.

        Where it goes on from the end of one that was asked for once, and nothing has gone on from there yet, what is
        new counts as asked for again: it is the newest turn of a conversation. What comes behind a common beginning is
        one of many.
        """
        path = list(self.tree.path(hashes))
        if not path:
            return
        last, length = path[-1]
        there = last.start + length
        is_end = length == len(last.hashes) and not last.children
        if there < len(hashes) and is_end and self.tracker.hotness(hashes[there - 1]).frequency == 1:
            self._continued.update(hashes[there:])
            self._await(hashes[there:])

    def accessed(
        self,
        hashes: Sequence[BlockHash],
        first_depth: int = 0,
        tenant: TenantShare = NOBODY,
        *,
        behind: BlockHash | None = None,
    ) -> None:
        """A prompt asks for these blocks, `first_depth` blocks deep: each counts once a request, whatever hits.

        behind: the block before them, where they are the answer to a turn.
        """
        owner = self.tree.owners.asked(tenant)
        if owner is not None:
            for order in self._orders.values():
                order.asked(owner)
        self.tracker.accessed(hashes, first_depth)
        self.policy.accessed(hashes)
        if self._promotions.unused:
            self._promotions.accessed(hashes)
        self._await(self.tree.missing(hashes))
        if behind in self._continued:
            self._continued.update(each for each in hashes if each in self.tree)

    def cached(
        self, hashes: Sequence[BlockHash], first: int, blocks: Sequence[int], tenant: TenantShare = NOBODY
    ) -> list[int]:
        """Blocks `first` and following of a prefix lie in these device blocks. Returns those that add nothing.

        tenant: owns those that lay in no tier.
        """
        return self.tree.insert(Tier.DEVICE, hashes, first, blocks, tenant)

    def freed(self, block: int) -> None:
        """A cached device block has no reference but the tree's any more."""
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
        """The pool gives a block to another request, or forgets its hash."""
        before = self.tree.blocks[Tier.DEVICE]
        if self._promotions.unused:
            self._promotions.left_device(block)
        node = self.tree.node_of(Tier.DEVICE, block)
        is_for_others = node is not None and self._orders[Tier.DEVICE].is_for_others(node.owner)
        given_up = self.tree.remove(Tier.DEVICE, block)
        self.counters.evicted_host += len(given_up)
        gone = before - self.tree.blocks[Tier.DEVICE]
        self.counters.evicted_device += gone
        self.counters.evicted_device_for_others += gone * is_for_others
        if given_up:
            self._release(given_up)

    def reset(self) -> None:
        """The model has changed: nothing that was computed is worth anything, copies under way among it.

        Nor may the caller publish what it computes or loads at this moment.
        """
        self._copying.clear()
        self._promotions.reset()
        self._release(self.tree.clear(Tier.DEVICE))
        self._release(self.tree.clear(Tier.HOST))

    # Host memory.

    def match(self, hashes: Sequence[BlockHash]) -> Match:
        """What is on the device, and what can be loaded from host memory behind it."""
        match = self.tree.match(hashes)
        reading = self._promotions.reading
        if reading and not reading.isdisjoint(match.host):
            first = next(index for index, slot in enumerate(match.host) if slot in reading)
            del match.host[first:]
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
        first, blocks, owner = self._not_in_host(hashes)
        del blocks[at_most:]
        # No room is made at the cost of the same prefix, whose other blocks this one needs or leads to.
        kept = self._in_host(hashes) if self.slots.free < len(blocks) else []
        self.hold(kept)
        slots: list[int] = []
        for index, block in enumerate(blocks, first):
            if block in unwritten:
                break
            refusal = self._refusal(hashes[index], index + 1, owner, len(slots))
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
        return CopyOut(tuple(hashes[:end]), first, tuple(blocks[: len(slots)]), tuple(slots), owner.share)

    def copied_out(self, copy: CopyOut) -> None:
        """The bytes have landed: from now on they can be loaded, unless there was a reset meanwhile."""
        self.counters.copied_out += len(copy.slots)
        if self._end_copy(copy):
            self._release(self.tree.insert(Tier.HOST, copy.hashes, copy.first, copy.slots, copy.tenant))
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
        """So many slots for another use; cached blocks give way, in the order in which they leave.

        None: they are not to be had; the blocks that have given way by then are gone.
        """
        order = self._orders[Tier.HOST]
        while self.slots.free < slots:
            coldest = order.coldest()
            if coldest is None:
                return None
            self._evict_host(coldest)
        return self.slots.allocate(slots)

    def hold(self, slots: Sequence[int]) -> None:
        """A load reads these slots: they are not evicted until it lets go of them."""
        self.slots.refer(slots)

    def let_go(self, slots: Sequence[int], *, loaded: bool) -> None:
        """A load has ended."""
        self.counters.copied_back += len(slots) * loaded
        self._release(slots)

    def promotion(self, at_most: int = 2**30) -> Promotion | None:
        """The first `at_most` blocks of the hottest host run that is worth it: see `Promotions.next`.

        Its slots are referenced; to be followed by `promoted` or `promotion_failed`. The caller holds the device blocks
        before `first`, or its pool might take them first; takes as many as are promoted from the pool, which gives the
        coldest; and publishes them once the bytes have landed.
        """
        return self._promotions.next(at_most)

    def promoted(self, promotion: Promotion, published: Sequence[BlockHash]) -> None:
        """The bytes have landed, and the caller has published what nobody else had computed meanwhile."""
        self._promotions.landed(promotion, published)
        self.let_go(promotion.slots, loaded=True)

    def promotion_failed(self, promotion: Promotion) -> None:
        self._promotions.failed(promotion)
        self.let_go(promotion.slots, loaded=False)

    def check_invariants(self) -> None:
        self.tree.check_invariants()
        self.slots.check_invariants()
        for order in self._orders.values():
            order.check_invariants()
        in_tree = {slot for slot, _ in self.tree.items(Tier.HOST)}
        assert all(self.slots.count(slot) for slot in in_tree), "a slot in the tree is free"
        assert in_tree.isdisjoint(self._copying), "a slot is in the tree before its bytes have landed"
        assert all(self.slots.count(slot) for slot in (*self._copying, *self._promotions.reading)), (
            "a slot is free too early"
        )
        assert len(self.tracker) <= len(self.tree) + len(self._awaited), "what is nowhere is not forgotten"
        assert all(each in self.tree or each in self._awaited for each in self._continued), "what is nowhere goes on"

    # Inside.

    def _forget_owner(self, owner: Owner) -> None:
        for order in self._orders.values():
            order.forget(owner)

    def _await(self, hashes: Sequence[BlockHash]) -> None:
        """These lie nowhere."""
        for each in hashes:
            self._awaited.pop(each, None)
            self._awaited[each] = None
        while len(self._awaited) > MOST_AWAITED:
            oldest, _ = self._awaited.popitem(last=False)
            if oldest not in self.tree:
                self._forget((oldest,))

    def _is_proven(self, block_hash: BlockHash) -> bool:
        return self.tracker.hotness(block_hash).frequency > 1 or block_hash in self._continued

    def _became_leaf(self, node: Node, tier: Tier) -> None:
        self._orders[tier].became_leaf(node)

    def _not_in_host(self, hashes: Sequence[BlockHash]) -> tuple[int, list[int], Owner]:
        """The first blocks of a prefix that are on the device, and neither in host memory nor on their way there.

        They end before the next one that is, or that is of another owner than the first. Returns that owner as well.
        """
        copying = set(self._copying.values())
        first, blocks, owner = 0, list[int](), self.tree.owners.nobody
        for node, length in self.tree.path(hashes):
            on_device, in_host = node.ids
            if on_device is None or (blocks and node.owner is not owner):
                break
            owner = node.owner
            for index in range(length if in_host is None else 0):
                if node.hashes[index] not in copying:
                    first = first if blocks else node.start + index
                    blocks.append(on_device[index])
                elif blocks:
                    return first, blocks, owner
            if in_host is not None and blocks:
                break
        return first, blocks, owner

    def _in_host(self, hashes: Sequence[BlockHash]) -> list[int]:
        found: list[int] = []
        for node, length in self.tree.path(hashes):
            found += (node.ids[Tier.HOST] or ())[:length]
        return found

    def _end_copy(self, copy: CopyOut) -> bool:
        """Whether its bytes are worth anything: there was no reset since it began."""
        known = [self._copying.pop(slot, None) is not None for slot in copy.slots]
        return all(known)

    def _refusal(self, block_hash: BlockHash, length: int, owner: Owner, taken: int) -> Refusal | None:
        """Why a block gets no slot. owner: whose it is, for which so many slots have been taken just now.

        Who has less than its share of host memory takes what is its own, as on the device; else the hotter stays.
        """
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
            if selective and not order.is_owed(block_hash, owner, taken):
                theirs = self.policy.priority(coldest.hashes[-1], len(coldest.hashes))
                if theirs >= self.policy.priority(block_hash, length):
                    return Refusal.COLDER_THAN_HOST
            self._evict_host(coldest)
        return None

    def _evict_host(self, leaf: Node) -> None:
        order = self._orders[Tier.HOST]
        slot, is_for_others = order.tail(leaf), order.is_for_others(leaf.owner)
        slots = [*self.tree.remove(Tier.HOST, slot), slot]
        self.counters.evicted_host += len(slots)
        self.counters.evicted_host_for_others += len(slots) * is_for_others
        self._release(slots)

    def _release(self, slots: Sequence[int]) -> None:
        freed = self.slots.release(slots)
        if len(freed) < len(slots):
            for slot in slots:
                self._orders[Tier.HOST].became_free(slot)

    def _forget(self, hashes: Sequence[BlockHash]) -> None:
        self.policy.forget(hashes)
        self.tracker.forget(hashes)
        self._continued.difference_update(hashes)
