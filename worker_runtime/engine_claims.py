"""Which chunks of prefixes one engine claims to have cached: followed from its block events, audited in its pools.

Everything here runs on the engine's thread; the follower is called on the asyncio loop.
"""

import logging
from collections.abc import Callable
from typing import Any

from cluster_core.engine_reports import PrefixClaimChange, PrefixClaims
from kv_transfer import vllm_private
from kv_transfer.blocks import Tier
from kv_transfer.claims.chunk_claims import ChunkClaims
from kv_transfer.claims.prefix_chunks import root_key
from worker_runtime.engine_settings import EngineRole, EngineSettings

logger = logging.getLogger(__name__)


class EngineClaims:
    """`start` once. A plain engine has no claims: its follower hears of none."""

    def __init__(self, engine: Any, block_size: int, settings: EngineSettings, on_loop: Callable[..., object]) -> None:
        self._engine = engine
        self._on_loop = on_loop
        self._follower: Callable[[PrefixClaimChange], None] | None = None
        # The group of layers whose blocks stand for whole prefixes; below 0: the model has none.
        self.group = 0
        self.chunks: ChunkClaims | None = None
        if settings.role is not EngineRole.ALONE:
            self.group = vllm_private.claims_group(engine)
            self.chunks = ChunkClaims(
                lambda salt, adapter: root_key(settings.service_id, salt, adapter),
                block_size,
                -(-settings.index.chunk_tokens // block_size),
            )

    def start(self) -> None:
        """Takes over the engine's block events."""
        from kv_transfer.claims import block_events

        chunks, group = self.chunks, self.group
        if chunks is None:
            return
        sink = block_events.EventSink(lambda events: block_events.apply(events, chunks, group))
        vllm_private.hand_over_block_events(self._engine, sink)

    @property
    def stored_blocks(self) -> int:
        """Since the engine started."""
        return self.chunks.stored_blocks if self.chunks is not None else 0

    def report_changes(self) -> None:
        """To the follower. Nobody hears of changes before there is one: it begins with all that there is."""
        if self.chunks is not None and self.chunks.has_changed:
            change = self.chunks.take()
            if self._follower is not None and change:
                self._on_loop(self._follower, change)

    def follow(self, on_change: Callable[[PrefixClaimChange], None]) -> None:
        self.report_changes()
        self._follower = on_change
        claims = self.chunks.claims() if self.chunks is not None else PrefixClaims()
        self._on_loop(
            on_change, PrefixClaimChange(dict.fromkeys(claims.device, True), dict.fromkeys(claims.host, True))
        )

    def audited(self) -> PrefixClaims:
        """From what the pools hold. The follower hears of what happened before the look ahead of the answer."""
        from kv_transfer.claims import block_events

        if self.chunks is None:
            return PrefixClaims()
        block_events.apply(vllm_private.take_block_events(self._engine), self.chunks, self.group)
        self.report_changes()
        tiers = vllm_private.tiers_of(self._engine)
        in_host = [block_hash for _, block_hash in tiers.tree.items(Tier.HOST)] if tiers is not None else []
        return self.chunks.audit(vllm_private.published_hashes(self._engine, self.group), in_host)
