"""What is reported of the tiers: their counters, and their hottest prefixes.

A report costs a few microseconds, so that every engine step may make one. The hottest prefixes are looked for on
request only: O(runs of the tree), of which `MOST_RUNS` are looked at, parents before children.
"""

import heapq
from collections import deque
from collections.abc import Iterator
from itertools import islice

from cluster_core.engine_reports import HotPrefix, TierReport
from kv_transfer.blocks import BlockHash, Tier
from kv_transfer.tiers.prefix_runs import Node
from kv_transfer.tiers.prefix_tiers import PrefixTiers
from kv_transfer.tiers.radix_tree import RadixTree

MOST_RUNS = 1 << 15
_HASH_BYTES = 4


def tier_report(tiers: PrefixTiers, block_bytes: int, device_capacity_blocks: int) -> TierReport:
    """block_bytes: of one block's KV over all layers and ranks. device_capacity_blocks: of the engine's pool."""
    counters, blocks = tiers.counters, tiers.tree.blocks
    return TierReport(
        prompt_tokens=counters.prompt_tokens,
        device_hit_tokens=counters.device_hit_tokens,
        host_hit_tokens=counters.host_hit_tokens,
        device_blocks=blocks[Tier.DEVICE],
        device_capacity_blocks=device_capacity_blocks,
        host_blocks=blocks[Tier.HOST],
        host_capacity_blocks=tiers.slots.size,
        copied_out_blocks=counters.copied_out,
        copied_out_bytes=counters.copied_out * block_bytes,
        copy_out_s=counters.copy_out_s,
        copied_back_blocks=counters.copied_back,
        copied_back_async_blocks=counters.copied_back_async,
        copied_back_bytes=counters.copied_back * block_bytes,
        copy_back_s=counters.copy_back_s,
        failed_copy_blocks=counters.copies_failed,
        refused_offers={reason.value: number for reason, number in counters.refused.items()},
        promoted_blocks=counters.promoted,
        promoted_used_blocks=counters.promotions_used,
        promoted_wasted_blocks=counters.promotions_wasted,
        evicted_device_blocks=counters.evicted_device,
        evicted_host_blocks=counters.evicted_host,
        evicted_device_for_others_blocks=counters.evicted_device_for_others,
        evicted_host_for_others_blocks=counters.evicted_host_for_others,
    )


def hottest_prefixes(tiers: PrefixTiers, block_size: int, at_most: int, most_runs: int = MOST_RUNS) -> list[HotPrefix]:
    """Of the runs of the tree those that the policy would give up last, first. block_size: tokens of a block.

    most_runs: that are looked at.
    """
    policy, tracker = tiers.policy, tiers.tracker
    turn = {group: index for index, group in enumerate(policy.groups())}

    def place(node: Node) -> tuple[int, float]:
        last = node.hashes[-1]
        return turn[policy.group(last)], policy.priority(last, len(node.hashes))

    found = heapq.nlargest(at_most, islice(_parents_first(tiers.tree), most_runs), key=place)
    return [
        HotPrefix(
            hash=_short(node.hashes[0]),
            tokens=node.end * block_size,
            device_blocks=_resident_blocks(node, Tier.DEVICE),
            host_blocks=_resident_blocks(node, Tier.HOST),
            frequency=tracker.hotness(node.hashes[-1]).frequency,
            priority=place(node)[1],
        )
        for node in found
    ]


def _parents_first(tree: RadixTree) -> Iterator[Node]:
    queue = deque(tree.root.children.values())
    while queue:
        node = queue.popleft()
        queue.extend(node.children.values())
        yield node


def _resident_blocks(node: Node, tier: Tier) -> int:
    """Of the prefix that ends with a run, how many blocks lie in the tier."""
    blocks = 0
    each: Node | None = node
    while each is not None:
        blocks += len(each.ids[tier] or ())
        each = each.parent
    return blocks


def _short(block_hash: BlockHash) -> str:
    text = block_hash.hex() if isinstance(block_hash, bytes) else f"{block_hash:08x}"
    return text[: 2 * _HASH_BYTES]
