"""The cached prefixes of a fake engine: the real tiers over a device that never runs out, without host memory."""

import hashlib
from itertools import count

from cluster_core.engine_reports import HotPrefix, TierReport
from kv_transfer.blocks import BlockHash
from kv_transfer.tiers import report as tier_report
from kv_transfer.tiers.settings import TierSettings, make_tiers

BLOCK_BYTES = 4096


class FakeTiers:
    def __init__(self, blocks: int, block_size_tokens: int) -> None:
        self._tiers = make_tiers(TierSettings(filter_entries=1024), blocks, 0, lambda block: False)
        self._capacity_blocks = blocks
        self._block_size_tokens = block_size_tokens
        self._next_block = count()

    def prefilled(self, prompt: tuple[int, ...]) -> None:
        """What of it was not cached is cached from now on."""
        hashes = self._hashes(prompt)
        self._tiers.accessed(hashes)
        hit = len(self._tiers.match(hashes[: (len(prompt) - 1) // self._block_size_tokens]).device)
        blocks = [next(self._next_block) for _ in hashes[hit:]]
        self._tiers.cached(hashes, hit, blocks)
        self._tiers.counters.prompt_tokens += len(prompt)
        self._tiers.counters.device_hit_tokens += hit * self._block_size_tokens

    def report(self) -> TierReport:
        return tier_report.tier_report(self._tiers, BLOCK_BYTES, self._capacity_blocks)

    def hottest(self, at_most: int) -> list[HotPrefix]:
        return tier_report.hottest_prefixes(self._tiers, self._block_size_tokens, at_most)

    def _hashes(self, prompt: tuple[int, ...]) -> list[BlockHash]:
        """Of its full blocks; each covers all before it."""
        ends = range(self._block_size_tokens, len(prompt) + 1, self._block_size_tokens)
        return [hashlib.blake2b(repr(prompt[:end]).encode(), digest_size=16).digest() for end in ends]
