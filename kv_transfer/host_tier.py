"""The host tier of cached prefixes, as part of a vLLM KV connector: the shell around `kv_transfer.tiers`.

Scheduler side only; the copies travel with those of host swap (`kv_transfer.host_swap`) and run at the start of a step,
all copies out before all copies back, before anything is computed. So within one step:
    copied out      blocks whose KV an earlier step has written; their slots can be read from the next step on
    copied back     slots that no copy of this step writes: they are held until all of its copies are decided
    promoted        as copied back, into blocks taken from the pool, published at once: the next step may read them
Prefixes and swapped-out sessions share the slots: a session's are never taken, and it may take those of prefixes.
"""

from typing import TYPE_CHECKING, Any

from kv_transfer.device_pool import TieredBlockPool
from kv_transfer.host_swap import COPIES, HostSwapping, NoTransfer
from kv_transfer.swap_ledger import SwapCopies, SwapLedger
from kv_transfer.tiers import PrefixTiers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


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


class HostTier:
    """What the connector asks and is told, for one scheduler. budget: blocks that one step copies out at most."""

    def __init__(
        self,
        tiers: PrefixTiers,
        pool: TieredBlockPool,
        requests: "Mapping[str, Request]",
        block_size: int,
        budget: int,
    ) -> None:
        self.tiers = tiers
        self._pool = pool
        self._requests = requests
        self._block_size = block_size
        self._budget = budget
        # Of a waiting request: its first block that can be loaded from host memory, and how many.
        self._hits: dict[str, tuple[int, int]] = {}
        self._loads: list[tuple[int, int]] = []
        self._held: list[int] = []
        # Scheduled by the step before, and how far each request has been offered.
        self._scheduled: list[Request] = []
        self._offered_blocks: dict[str, int] = {}
        self._prefilled = False

    def miss(self, request_id: str) -> None:
        """A waiting request takes what it lacks from elsewhere."""
        self._hits.pop(request_id, None)

    def hit(self, request: "Request", num_computed_tokens: int) -> int:
        """Tokens of a waiting request that host memory has behind those it finds on the device."""
        self.miss(request.request_id)
        remote = (request.kv_transfer_params or {}).get("do_remote_prefill")
        if remote or request.skip_reading_prefix_cache or num_computed_tokens % self._block_size:
            return 0
        # One token at least has to be computed.
        match = self.tiers.match(request.block_hashes[: (request.num_tokens - 1) // self._block_size])
        first = num_computed_tokens // self._block_size
        if not match.host or len(match.device) != first:
            return 0
        self._hits[request.request_id] = first, len(match.host)
        return len(match.host) * self._block_size

    def load(self, request: "Request", blocks: "KVCacheBlocks") -> bool:
        """The request is admitted and has got these device blocks. False: it reads nothing from here."""
        first, count = self._hits.pop(request.request_id, (0, 0))
        if not count:
            return False
        slots = self.tiers.host_slots_of(request.block_hashes, first, count)
        assert len(slots) == count, "a host hit has gone while its request was admitted"
        (device_blocks,) = blocks.get_block_ids()
        self.tiers.hold(slots)
        self._held += slots
        self._loads += zip(device_blocks[first : first + count], slots, strict=True)
        return True

    def copies(self) -> SwapCopies:
        """What the step that is being built copies, before anybody gives up a slot that a copy of this step reads."""
        out = self._copies_out()
        back = [*self._loads, *self._promote()]
        self._loads = []
        return SwapCopies(tuple(out), tuple(back))

    def built(self, scheduler_output: "SchedulerOutput") -> None:
        """The step's copies are all decided."""
        self.tiers.let_go(self._held, loaded=True)
        self._held = []
        self._pool.unwritten.clear()
        self._scheduled = [self._requests[name] for name in scheduler_output.num_scheduled_tokens]
        self._prefilled = bool(scheduler_output.scheduled_new_reqs)

    def forget(self, request_id: str) -> None:
        self._hits.pop(request_id, None)
        self._offered_blocks.pop(request_id, None)

    def _copies_out(self) -> list[tuple[int, int]]:
        pairs: list[tuple[int, int]] = []
        for request in self._scheduled:
            computed = min(request.num_computed_tokens // self._block_size, len(request.block_hashes))
            room = self._budget - len(pairs)
            if room <= 0 or computed == self._offered_blocks.get(request.request_id):
                continue
            copy = self.tiers.worth_copying(request.block_hashes[:computed], room, self._pool.unwritten)
            if not request.is_finished():
                self._offered_blocks[request.request_id] = computed
            if copy is not None:
                pairs += zip(copy.blocks, copy.slots, strict=True)
                self.tiers.copied_out(copy)
        return pairs

    def _promote(self) -> list[tuple[int, int]]:
        """After a prefill, what is hot and not on the device, in place of what is colder there."""
        promotion = self.tiers.promotion() if self._prefilled else None
        if promotion is None:
            return []
        before = [self._pool.blocks[each] for each in self.tiers.match(promotion.hashes[: promotion.first]).device]
        self._pool.touch(before)
        taken = self._pool.get_new_blocks(len(promotion.slots))
        self._pool.publish(promotion.hashes, promotion.first, taken)
        self._pool.free_blocks([*reversed(taken), *reversed(before)])
        self._held += promotion.slots
        return [(block.block_id, slot) for block, slot in zip(taken, promotion.slots, strict=True)]


class HostTiering(HostSwapping):
    """Mixin for a vLLM connector; goes before it in the bases. Without `attach` it does nothing."""

    host_tier: HostTier | None = None

    def attach(self, tiers: PrefixTiers, pool: TieredBlockPool, requests: "Mapping[str, Request]", budget: int) -> None:
        """The scheduler is ready: its tiers and its pool, its table of requests. budget: see `HostTier`."""
        self.swaps = SwapLedger(SharedSlots(tiers), self._block_size)
        self.host_tier = HostTier(tiers, pool, requests, self._block_size, budget)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        matched, later = super().get_num_new_matched_tokens(request, num_computed_tokens)
        assert self.swaps is not None
        if self.host_tier is None:
            return matched, later
        if matched != 0 or self.swaps.tokens(request.request_id):
            self.host_tier.miss(request.request_id)
            return matched, later
        return self.host_tier.hit(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        if self.host_tier is not None and num_external_tokens and self.host_tier.load(request, blocks):
            num_external_tokens = 0
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> "KVConnectorMetadata":
        tier = self.host_tier
        copies = tier.copies() if tier is not None else SwapCopies()
        metadata: KVConnectorMetadata = super().build_connector_meta(scheduler_output)
        swaps: SwapCopies = getattr(metadata, COPIES)
        setattr(metadata, COPIES, SwapCopies((*swaps.out, *copies.out), (*swaps.back, *copies.back)))
        if tier is not None:
            tier.built(scheduler_output)
        return metadata

    def request_finished(self, request: "Request", block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        if self.host_tier is not None:
            self.host_tier.forget(request.request_id)
        return super().request_finished(request, block_ids)

    def request_finished_all_groups(self, request: "Request", block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        if self.host_tier is not None:
            self.host_tier.forget(request.request_id)
        return super().request_finished_all_groups(request, block_ids)


class HostTierConnector(HostTiering, NoTransfer):
    """Host swap and host tier alone, for an engine that hands nothing over."""
