"""The cached blocks of a simulated worker: device blocks by reference counts, and the real tiers over them.

Who owns what:
    a running prompt   its cached blocks, the host slots being loaded and its new blocks are referenced until it lets go
    the rest           the tree refers to it, and gives it up when room is needed
A block counts one copy to host memory. Changes in a tier have the form in which a worker claims them (`claims`).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from kv_transfer.blocks import BlockHash, Tier
from kv_transfer.claims.claims import ClaimChange
from kv_transfer.claims.prefix_chunks import Keys
from kv_transfer.host_memory.block_references import BlockReferences
from kv_transfer.tiers.prefix_runs import Match
from kv_transfer.tiers.prefix_tiers import PrefixTiers
from kv_transfer.tiers.settings import TierSettings, make_tiers
from kv_transfer.tiers.tier_terms import Admission, TierRules


class BlockCache:
    """host_blocks: 0 for none. on_store: gets the number of blocks that are copied to host memory."""

    def __init__(
        self,
        settings: TierSettings,
        device_blocks: int,
        host_blocks: int,
        on_store: Callable[[int], None] = lambda blocks: None,
    ) -> None:
        if not host_blocks:
            settings = replace(settings, rules=TierRules(Admission.NONE, promotion=False))
        self._device = BlockReferences(device_blocks)
        self.tiers: PrefixTiers = make_tiers(
            settings, device_blocks, host_blocks, lambda block: self._device.count(block) > 1
        )
        self.tiers.on_host_change = self._host_changed
        self._on_store = on_store
        # By tier, blocks that have come or gone since the last `claim_changes`; the last change counts.
        self._changes: tuple[dict[BlockHash, bool], dict[BlockHash, bool]] = ({}, {})

    @property
    def size(self) -> int:
        return self._device.size

    @property
    def obtainable(self) -> int:
        """Device blocks that are free, or cached and not referenced otherwise."""
        return self._device.free + self.tiers.tree.blocks[Tier.DEVICE] - self._device.shared

    def match(self, hashes: Sequence[BlockHash]) -> Match:
        """The cached beginning of a prefix; nothing is referenced."""
        return self.tiers.match(hashes)

    def hold(self, match: Match) -> None:
        self._device.refer(match.device)
        self.tiers.hold(match.host)

    def unhold(self, match: Match) -> None:
        """Of a prompt that does not begin after all."""
        self.tiers.let_go(match.host, loaded=False)
        self.free(match.device)

    def take(self, number: int) -> list[int]:
        """So many device blocks, or as many as can be had; cached ones give way, coldest first."""
        while self._device.free < number:
            coldest = self.tiers.coldest_device_block()
            if coldest is None:
                break
            node = self.tiers.tree.node_of(Tier.DEVICE, coldest)
            assert node is not None
            self._changes[Tier.DEVICE][node.hashes[-1]] = False
            self.tiers.left_device(coldest)
            self._device.release([coldest])
        blocks = self._device.allocate(min(number, self._device.free))
        assert blocks is not None
        return blocks

    def publish(self, hashes: Sequence[BlockHash], first: int, blocks: Sequence[int]) -> None:
        """Blocks `first` and following of a prefix have been computed here. What is known already adds nothing."""
        refused = set(self.tiers.cached(hashes, first, blocks))
        for block in refused:
            self.tiers.left_device(block)
        added = [(block, each) for block, each in zip(blocks, hashes[first:], strict=False) if block not in refused]
        self._device.refer([block for block, _ in added])
        self._changes[Tier.DEVICE].update((each, True) for _, each in added)

    def free(self, blocks: Sequence[int]) -> None:
        """Nobody needs them any more; what is cached stays until there is need of room."""
        self._device.release(blocks)
        for block in reversed(blocks):
            self.tiers.freed(block)

    def copy_out(self, hashes: Sequence[BlockHash]) -> None:
        """What of a prefix that is held is worth a copy to host memory gets one."""
        while (copy := self.tiers.worth_copying(hashes)) is not None:
            self.tiers.copied_out(copy)
            self._on_store(len(copy.slots))

    def promote(self) -> int:
        """Brings the hottest prefix of host memory to the device if that is worth it; blocks loaded."""
        promotion = self.tiers.promotion()
        if promotion is None:
            return 0
        before = self.tiers.match(promotion.hashes).device
        self._device.refer(before)
        blocks = self.take(len(promotion.slots))
        self.publish(promotion.hashes, promotion.first, blocks)
        self.free([*before, *blocks])
        self.tiers.promoted(promotion, promotion.hashes[promotion.first :])
        return len(promotion.slots)

    def claim_changes(self) -> ClaimChange:
        """What has changed in the tiers since the last call."""
        device, host = self._changes
        change = ClaimChange(*(_keys(tier, there) for tier in (device, host) for there in (True, False)))
        device.clear()
        host.clear()
        return change

    def check_invariants(self) -> None:
        self.tiers.check_invariants()
        self._device.check_invariants()

    def _host_changed(self, hashes: Sequence[BlockHash], there: bool) -> None:
        self._changes[Tier.HOST].update(dict.fromkeys(hashes, there))


def _keys(changes: dict[BlockHash, bool], there: bool) -> Keys:
    return np.array([each for each, is_there in changes.items() if is_there is there], dtype=np.uint64)
