"""The host tier of cached prefixes, as part of a vLLM KV connector.

Prefixes and swapped-out sessions share the slots: a session's are never taken, and it may take those of prefixes.
"""

from typing import TYPE_CHECKING, Any

from kv_transfer import vllm_private
from kv_transfer.host_memory.copy_worker import CopyReport, CopyWorker
from kv_transfer.host_memory.host_swap import COPIES, HostSwapping
from kv_transfer.host_memory.swap_ledger import SwapCopies, SwapLedger
from kv_transfer.tiers.device_pool import TieredBlockPool
from kv_transfer.tiers.host_tier import HostTier
from kv_transfer.tiers.prefix_tiers import PrefixTiers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

BACKGROUND = "rachis_background_copies"


class SharedSlots:
    """What the tiers leave of their slots to others: the free ones, and those that a cached prefix gives up."""

    def __init__(self, tiers: PrefixTiers) -> None:
        self._tiers = tiers
        self.size = tiers.slots.size

    @property
    def free(self) -> int:
        return self._tiers.free_slots

    def allocate(self, number: int) -> list[int] | None:
        return self._tiers.claim(number)

    def release(self, slots: "Sequence[int]") -> None:
        self._tiers.slots.release(slots)


class HostTiering(HostSwapping):
    """Mixin for a vLLM connector; goes before it in the bases. Without `attach` it does nothing."""

    host_tier: HostTier | None = None
    _copy_worker: CopyWorker | None = None

    # Scheduler side.

    def use_pool(self, pool: Any) -> None:
        """The scheduler is ready: its pool of device blocks."""

    def attach(
        self,
        tiers: PrefixTiers,
        pool: TieredBlockPool,
        requests: "Mapping[str, Request]",
        budget: int,
        goes_async: "Callable[[int, bool], bool]",
    ) -> HostTier:
        """The scheduler is ready: its tiers and its pool, its table of requests. The others: see `HostTier`."""
        self.swaps = SwapLedger(SharedSlots(tiers), self._block_size)
        workers = vllm_private.workers_of(self)
        self.host_tier = HostTier(
            tiers, pool, requests, self._block_size, budget=budget, workers=workers, goes_async=goes_async
        )
        return self.host_tier

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        matched, later = super().get_num_new_matched_tokens(request, num_computed_tokens)
        assert self.swaps is not None
        if self.host_tier is None:
            return matched, later
        is_swapped = bool(self.swaps.tokens(request.request_id))
        # One with an adapter might be back, and hold blocks, long before it gets its adapter's place.
        if is_swapped and matched and request.lora_request is None:
            return matched, self.host_tier.resumes_async(request.request_id, -(-matched // self._block_size))
        if is_swapped or matched != 0:
            self.host_tier.miss(request.request_id)
            return matched, later
        return self.host_tier.hit(request, num_computed_tokens)

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        if self.host_tier is not None and num_external_tokens and self.host_tier.load(request, blocks):
            num_external_tokens = 0
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def _swap_back(self, request: "Request", first: int, device_blocks: "Sequence[int]") -> None:
        if self.host_tier is None or not self.host_tier.admits_async(request.request_id):
            super()._swap_back(request, first, device_blocks)
            return
        assert self.swaps is not None
        self.host_tier.resume(request, first, device_blocks, self.swaps.take_slots(request.request_id, first))

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> "KVConnectorMetadata":
        tier = self.host_tier
        # Decided before any request gives up a slot that a copy of this step reads.
        background = tier.background() if tier is not None else []
        metadata: KVConnectorMetadata = super().build_connector_meta(scheduler_output)
        setattr(metadata, BACKGROUND, background)
        if tier is not None:
            swaps: SwapCopies = getattr(metadata, COPIES)
            setattr(metadata, COPIES, SwapCopies(swaps.out, (*swaps.back, *tier.loads().back)))
            tier.built(scheduler_output)
        return metadata

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        super().update_connector_output(connector_output)
        report = connector_output.kv_connector_worker_meta
        if self.host_tier is not None and isinstance(report, CopyReport):
            self.host_tier.take_in(report)
            # vLLM goes on as with KV that comes from another worker.
            connector_output.finished_recving = (
                connector_output.finished_recving or set()
            ) | self.host_tier.take_landed()

    def has_pending_push_work(self) -> bool:
        """Whether the engine has to go on stepping without requests: for copies in the background."""
        return (self.host_tier is not None and self.host_tier.has_work) or super().has_pending_push_work()

    def request_finished(self, request: "Request", block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        if self.host_tier is not None:
            self.host_tier.forget(request.request_id)
        return super().request_finished(request, block_ids)

    def request_finished_all_groups(self, request: "Request", block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        if self.host_tier is not None:
            self.host_tier.forget(request.request_id)
        return super().request_finished_all_groups(request, block_ids)

    # Worker side.

    def register_kv_caches(self, kv_caches: "dict[str, torch.Tensor]") -> None:
        super().register_kv_caches(kv_caches)
        if self._host_pool is not None:
            self._copy_worker = CopyWorker(self._host_pool)

    def handle_preemptions(self, kv_connector_metadata: "KVConnectorMetadata") -> None:
        super().handle_preemptions(kv_connector_metadata)
        if self._copy_worker is not None:
            self._copy_worker.begin(getattr(kv_connector_metadata, BACKGROUND))

    def build_connector_worker_meta(self) -> "KVConnectorWorkerMetadata | None":
        return self._copy_worker.report() if self._copy_worker is not None else None

    def shutdown(self) -> None:
        if self._copy_worker is not None:
            self._copy_worker.close()
        super().shutdown()
