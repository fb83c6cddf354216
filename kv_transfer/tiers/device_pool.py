"""vLLM's pool of device blocks, giving up first what `kv_transfer.tiers.prefix_tiers` finds coldest.

`take_over` replaces the free queue of a pool and mixes into its class what keeps the radix tree in step with it. Where
a free block lies:
    without a hash, or with one that leads nowhere     on the pile, taken first, the last one in front (as in vLLM)
    with a hash                                        in the tree, in the order of its policy
A block whose hash is published already is not published twice: it stays its request's own. So the request may hold
blocks behind one that no request holds; that one is taken when nothing else is left, and what follows it can be reached
no more.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock, get_block_hash, make_block_hash_with_group_id

from cluster_core.engine_jobs import NOBODY, TenantShare
from kv_transfer import vllm_private
from kv_transfer.blocks import Tier
from kv_transfer.claims.block_events import EventfulBlockPool
from kv_transfer.request_tenant import tenant_of
from kv_transfer.tiers.prefix_tiers import PrefixTiers

_GROUP = 0


class TieredFreeQueue:
    """In place of vLLM's `FreeKVCacheBlockQueue`, with its methods."""

    def __init__(self, blocks: Sequence[KVCacheBlock], tiers: PrefixTiers) -> None:
        # vLLM reads it as a field.
        self.num_free_blocks = 0
        self._blocks = blocks
        self._tiers = tiers
        self._pile: dict[int, KVCacheBlock] = {}

    def popleft(self) -> KVCacheBlock:
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """The next blocks to take; the pool forgets their hashes, and the tree them, one by one as they are taken."""
        if n > self.num_free_blocks:
            raise ValueError(f"{n} blocks are wanted, {self.num_free_blocks} are free")
        self.num_free_blocks -= n
        taken: list[KVCacheBlock] = []
        while len(taken) < n:
            if self._pile:
                taken.append(self._pile.popitem()[1])
                continue
            coldest = self._tiers.coldest_device_block()
            block = self._blocks[coldest] if coldest is not None else self._out_of_order(taken)
            self._tiers.left_device(block.block_id)
            taken.append(block)
        return taken

    def remove(self, block: KVCacheBlock) -> None:
        self._pile.pop(block.block_id, None)
        self.num_free_blocks -= 1

    def append(self, block: KVCacheBlock) -> None:
        self.append_n([block])

    def append_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Blocks that are worth keeping, as far as the tree counts on them."""
        self.num_free_blocks += len(blocks)
        for block in blocks:
            if self._tiers.tree.node_of(Tier.DEVICE, block.block_id) is None:
                self._pile[block.block_id] = block
            else:
                self._tiers.freed(block.block_id)

    def prepend_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Blocks without a hash; the first of them is taken first."""
        self.num_free_blocks += len(blocks)
        for block in reversed(blocks):
            self._pile[block.block_id] = block

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """All free blocks; those of the tree in no particular order."""
        kept = [each for each in self._blocks if self._is_free(each) and each.block_id not in self._pile]
        return [*reversed(self._pile.values()), *kept]

    def rebuild(self) -> None:
        """The pool has forgotten all hashes."""
        self._pile = {each.block_id: each for each in self._blocks if self._is_free(each)}

    def check_invariants(self) -> None:
        free = {each.block_id for each in self._blocks if self._is_free(each)}
        assert self.num_free_blocks == len(free), "free blocks miscounted"
        assert self._pile.keys() <= free, "a block on the pile is in use"

    def _out_of_order(self, taken: Iterable[KVCacheBlock]) -> KVCacheBlock:
        """A free block that is no tail of a leaf: see the module. O(blocks), and rare.

        What the tree does not count on goes to the pile, all at once. Otherwise the deepest one: least is lost with it.
        """
        skip = {each.block_id for each in taken}
        free = [each for each in self._blocks if self._is_free(each) and each.block_id not in skip]
        depths = {block.block_id: self._tiers.depth(block.block_id) for block in free}
        self._pile.update((block.block_id, block) for block in free if depths[block.block_id] is None)
        if self._pile:
            return self._pile.popitem()[1]
        return max(free, key=lambda block: depths[block.block_id] or 0)

    @staticmethod
    def _is_free(block: KVCacheBlock) -> bool:
        return not block.ref_cnt and not block.is_null


class TieredBlockPool(EventfulBlockPool):
    """Mixed into a pool that vLLM has made. See the module."""

    tiers: PrefixTiers
    # Published since it was last cleared: the step that is being scheduled writes their KV.
    unwritten: set[int]

    def cache_full_blocks(
        self,
        request: Any,
        blocks: list[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: list[bool] | None = None,
    ) -> None:
        hashes = request.block_hashes
        wanted = block_mask or [True] * (num_full_blocks - num_cached_blocks)
        new = [
            each and not self._is_published(block_hash)
            for each, block_hash in zip(wanted, hashes[num_cached_blocks:num_full_blocks], strict=True)
        ]
        # Run by run: with a mask, vLLM's event would have the tokens of all blocks and the hashes of some.
        for start, end in _runs(new):
            super().cache_full_blocks(
                request, blocks, num_cached_blocks + start, num_cached_blocks + end, block_size, kv_cache_group_id
            )
        written_later = self._count_on(
            hashes, num_cached_blocks, blocks[num_cached_blocks:num_full_blocks], new, tenant_of(request)
        )
        self.unwritten.update(written_later)

    def publish(self, hashes: Sequence[Any], first: int, blocks: Sequence[KVCacheBlock]) -> list[Any]:
        """Blocks `first` and following of a prefix lie in these blocks of the caller's, whose KV is there.

        They lie in host memory, and stay whose they are.
        Returns the hashes of those that were not published before; the others stay the caller's own.
        """
        new = [not self._is_published(block_hash) for block_hash in hashes[first:]]
        for is_new, block_hash, block in zip(new, hashes[first:], blocks, strict=True):
            if is_new:
                vllm_private.publish_block(self, make_block_hash_with_group_id(block_hash, _GROUP), block)
        self._count_on(hashes, first, blocks, new, NOBODY)
        published = [block_hash for is_new, block_hash in zip(new, hashes[first:], strict=True) if is_new]
        self.add_event(Tier.DEVICE, published, _GROUP, there=True)
        return published

    def _count_on(
        self,
        hashes: Sequence[Any],
        first: int,
        blocks: Sequence[KVCacheBlock],
        new: Sequence[bool],
        tenant: TenantShare,
    ) -> list[int]:
        """The new ones come into the tree, run by run. Returns which they are."""
        added: list[int] = []
        for start, end in _runs(new):
            identities = [block.block_id for block in blocks[start:end]]
            self.tiers.cached(hashes[: first + end], first + start, identities, tenant)
            added += identities
        return added

    def _is_published(self, block_hash: Any) -> bool:
        keyed = make_block_hash_with_group_id(block_hash, _GROUP)
        return self.cached_block_hash_to_block.get_one_block(keyed) is not None

    def _remove_cached_block_hashes(self, block: KVCacheBlock) -> list[Any]:
        self.tiers.left_device(block.block_id)
        removed: list[Any] = super()._remove_cached_block_hashes(block)
        return removed

    def reset_prefix_cache(self) -> bool:
        done: bool = super().reset_prefix_cache()
        if done:
            self.tiers.reset()
            self.free_block_queue.rebuild()
        return done

    def check_invariants(self) -> None:
        """The tree against what vLLM has published."""
        self.tiers.check_invariants()
        self.free_block_queue.check_invariants()
        published = {
            each.block_id: get_block_hash(each.block_hash) for each in self.blocks if each.block_hash is not None
        }
        in_tree = dict(self.tiers.tree.items(Tier.DEVICE))
        assert in_tree == published, "the tree and the pool disagree"


def _runs(new: Iterable[bool]) -> Iterator[tuple[int, int]]:
    """Beginning and end of each run of new ones."""
    end = 0
    for is_new, run in groupby(new):
        start, end = end, end + len(list(run))
        if is_new:
            yield start, end


def take_over(pool: BlockPool, tiers: PrefixTiers) -> TieredBlockPool:
    """Has a fresh pool evict in the order of these tiers."""
    pool.__class__ = TieredBlockPool
    assert isinstance(pool, TieredBlockPool)
    pool.tiers = tiers
    pool.unwritten = set()
    tiers.on_host_change = lambda hashes, there: pool.add_event(Tier.HOST, hashes, _GROUP, there=there)
    free = pool.free_block_queue.get_all_free_blocks()
    queue = TieredFreeQueue(pool.blocks, tiers)
    for block in free:
        block.prev_free_block = block.next_free_block = None
    queue.prepend_n(free)
    pool.free_block_queue = queue
    return pool
