"""vLLM's block events, between its scheduler and `kv_transfer.claims.chunk_claims`, within one process.

`EventfulBlockPool` is mixed into vLLM's pool so that events say where blocks lie: of two blocks with one hash, the
first that leaves removes nothing. The tiers add to the same queue, so that all events stand in the order in which
things happened: what comes to host memory has its name from the device, and may leave that in the same step. Those
events carry no tokens. `EventSink` takes the place of vLLM's publisher and gets the events of each step on the engine
thread.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    EventPublisher,
)
from vllm.v1.core.block_pool import BlockPool

from kv_transfer.blocks import Tier
from kv_transfer.claims.chunk_claims import ChunkClaims, extra_keys_of

_TIERS = {MEDIUM_GPU: Tier.DEVICE, MEDIUM_CPU: Tier.HOST}


class EventfulBlockPool(BlockPool):
    """Mixed into a pool that vLLM has made. See the module."""

    def add_event(self, tier: Tier, hashes: Sequence[Any], group: int, *, there: bool) -> None:
        """Blocks whose names the index of claims knows have come to a tier or left it."""
        if not self.enable_kv_cache_events or not hashes:
            return
        medium = MEDIUM_GPU if tier is Tier.DEVICE else MEDIUM_CPU
        if there:
            event = BlockStored(list(hashes), None, [], self.hash_block_size, None, medium, None, group_idx=group)
        else:
            event = BlockRemoved(list(hashes), medium, group)
        self.kv_event_queue.append(event)

    def _emit_block_removed_events(self, block_hashes: list[Any]) -> None:
        known = self.cached_block_hash_to_block
        super()._emit_block_removed_events([each for each in block_hashes if known.get_one_block(each) is None])


def emit_where_blocks_lie(pool: BlockPool) -> EventfulBlockPool:
    """For a fresh pool that keeps vLLM's own order: its events say where blocks lie."""
    pool.__class__ = EventfulBlockPool
    assert isinstance(pool, EventfulBlockPool)
    return pool


class EventSink(EventPublisher):
    """See the module."""

    def __init__(self, take_in: Callable[[Sequence[Any]], None]) -> None:
        super().__init__()
        self._take_in = take_in

    def publish(self, events: EventBatch) -> None:
        self._take_in(events.events)

    def shutdown(self) -> None:
        """Holds nothing."""


def apply(events: Iterable[Any], claims: ChunkClaims, group: int) -> None:
    """Brings the claims up to these events of one group of a model's layers, whose blocks have the claims' size."""
    for event in events:
        if isinstance(event, AllBlocksCleared):
            claims.cleared()
        elif event.group_idx != group or event.medium not in _TIERS:
            continue
        elif isinstance(event, BlockRemoved):
            claims.removed(_TIERS[event.medium], event.block_hashes)
        elif event.block_size == claims.block_tokens:
            adapter = event.lora_name or ""
            salt, foreign = extra_keys_of(event.extra_keys, adapter)
            claims.stored(
                _TIERS[event.medium],
                event.block_hashes,
                event.parent_block_hash,
                event.token_ids,
                salt,
                adapter,
                foreign,
            )
