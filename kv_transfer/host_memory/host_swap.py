"""Swapping a preempted request's blocks to host memory and back, as part of a vLLM KV connector.

Scheduler side: `HostSwapping` answers for what is swapped out as a connector answers for remote KV: when the request is
admitted again, its tokens are an external match that is loaded before the step computes, or beside steps, which
`kv_transfer.tiers.host_tiering` decides; it mixes this in. Worker side: the copies of a step run before its forward
pass, all copies out before all copies back (`kv_transfer.host_memory.swap_ledger`), on the stream that computes, so
that steps in flight are ordered as well. What comes from another engine is on no stream: it is written into its blocks
from the moment that it is asked for. So where an engine pulls, copies out are waited for: the blocks of a victim may be
those of a pull in the same step.
"""

from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole

from cluster_core.errors import StartError
from kv_transfer import vllm_private
from kv_transfer.host_memory.block_references import BlockReferences
from kv_transfer.host_memory.host_pool import HostPool
from kv_transfer.host_memory.swap_ledger import SwapCopies, SwapLedger
from kv_transfer.kv_layout import layout_of
from kv_transfer.model_features import Feature, allows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1 as _Connector
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request
else:
    _Connector = object

HOST_BYTES = "rachis_host_bytes"
HOST_RATIO = "rachis_host_ratio"
COPIES = "rachis_swap_copies"


class HostSwapping(_Connector):
    """Mixin for a vLLM connector; goes before it in the bases. `swaps` is None on the worker's side."""

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._swap_config = kv_cache_config
        self._host_slots = slots_of(vllm_config, kv_cache_config)
        self._host_pool: HostPool | None = None
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        self._pulls = transfer.is_kv_consumer
        block_size = vllm_config.cache_config.block_size
        slots = BlockReferences(self._host_slots)
        self.swaps = SwapLedger(slots, block_size) if role is KVConnectorRole.SCHEDULER else None
        self._block_size = block_size

    # Scheduler side.

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        assert self.swaps is not None
        swapped = self.swaps.tokens(request.request_id)
        if swapped:
            return max(0, swapped - num_computed_tokens), False
        matched: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return matched

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        assert self.swaps is not None
        swapped = self.swaps.tokens(request.request_id)
        if swapped and num_external_tokens:
            first = (swapped - num_external_tokens) // self._block_size
            (device_blocks,) = blocks.get_block_ids()
            self._swap_back(request, first, device_blocks[first : -(-swapped // self._block_size)])
            num_external_tokens = 0
        else:
            # All of it is cached on the device still, or the request does not read what was computed before.
            self.swaps.drop(request.request_id)
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def _swap_back(self, request: "Request", first: int, device_blocks: "Sequence[int]") -> None:
        """A swapped request is resumed: its blocks from number `first` on are to be copied into these."""
        assert self.swaps is not None
        self.swaps.swap_back(request.request_id, first, device_blocks)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        assert self.swaps is not None
        metadata: KVConnectorMetadata = super().build_connector_meta(scheduler_output)
        setattr(metadata, COPIES, self.swaps.take_copies())
        return metadata

    def request_finished(self, request: "Request", block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        assert self.swaps is not None
        self.swaps.drop(request.request_id)
        answer: tuple[bool, dict[str, Any] | None] = super().request_finished(request, block_ids)
        return answer

    def request_finished_all_groups(self, request: "Request", block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        assert self.swaps is not None
        self.swaps.drop(request.request_id)
        answer: tuple[bool, dict[str, Any] | None] = super().request_finished_all_groups(request, block_ids)
        return answer

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        if self._host_slots:
            views = vllm_private.block_views(self._swap_config, kv_caches)
            self._host_pool = HostPool(views, self._host_slots)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        super().handle_preemptions(kv_connector_metadata)
        if self._host_pool is not None:
            copies: SwapCopies = getattr(kv_connector_metadata, COPIES)
            self._host_pool.carry_out(copies)
            if copies.out and self._pulls:
                self._host_pool.wait()


def slots_of(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> int:
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    layout = layout_of(vllm_config, kv_cache_config)
    if not (allows(layout, Feature.TIERS) or allows(layout, Feature.SESSIONS)):
        return 0
    ratio: float | None = transfer.get_from_extra_config(HOST_RATIO, None)
    if ratio is not None:
        return int(ratio * kv_cache_config.num_blocks)
    given = int(transfer.get_from_extra_config(HOST_BYTES, 0))
    # A model without layers of its own, as in a simulation, has blocks of no bytes: then the figure counts blocks.
    block = max(1, vllm_private.bytes_per_block(kv_cache_config))
    if 0 < given < block:
        raise StartError(
            f"tiers.host_gib is {given} bytes for each rank, and one block takes {block}: "
            f"give at least {block / 2**30:.6f} GiB for each, or 0 for no host memory"
        )
    return given // block
