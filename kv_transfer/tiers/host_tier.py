"""The host tier of cached prefixes, as part of a vLLM KV connector: the shell around `kv_transfer.tiers.prefix_tiers`.

Copies that a request waits for travel with those of host swap and run at the start of a step, before anything is
computed (`kv_transfer.host_memory.host_swap`). The others run in the background and take as many steps as they need
(`kv_transfer.host_memory.copy_worker`); until the workers report them, what they read and write belongs to them:
    loaded         host slots, held until the step that reads them is built, to blocks of a request that is admitted
    copied out     blocks whose KV an earlier step has written, referenced; the slots are in no tree yet
    promoted       host slots, referenced, to blocks taken from the pool and not yet published
Prefixes and swapped-out sessions share the slots: a session's are never taken, and it may take those of prefixes.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kv_transfer import vllm_private
from kv_transfer.host_memory.copy_worker import BackgroundCopy, CopyReport, CopyWorker
from kv_transfer.host_memory.host_swap import COPIES, HostSwapping
from kv_transfer.host_memory.swap_ledger import SwapCopies, SwapLedger
from kv_transfer.tiers.device_pool import TieredBlockPool
from kv_transfer.tiers.prefix_tiers import PrefixTiers
from kv_transfer.tiers.tier_terms import CopyOut, Promotion

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

BACKGROUND = "rachis_background_copies"
# Prefixes that wait for their turn to be copied out; the oldest are given up.
_MOST_OFFERS = 256


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


@dataclass(slots=True)
class _Running:
    """A copy in the background."""

    plan: CopyOut | Promotion
    # Device blocks that it holds.
    blocks: "list[KVCacheBlock]"
    # Of so many workers are still due.
    reports: int
    failed: bool = False


class HostTier:
    """The tiers of one scheduler, as its connector drives them.

    budget: blocks on their way to host memory at most. workers: of the engine, each of which makes every copy.
    """

    def __init__(
        self,
        tiers: PrefixTiers,
        pool: TieredBlockPool,
        requests: "Mapping[str, Request]",
        block_size: int,
        *,
        budget: int,
        workers: int,
    ) -> None:
        self.tiers = tiers
        self._pool = pool
        self._requests = requests
        self._block_size = block_size
        self._budget = budget
        self._workers = workers
        # Of a waiting request: its first block that can be loaded from host memory, and how many.
        self._hits: dict[str, tuple[int, int]] = {}
        self._loads: list[tuple[int, int]] = []
        # Tokens that were loaded for a request when it was last admitted.
        self._loaded: dict[str, int] = {}
        self._held: list[int] = []
        # Scheduled by the step before, and how much of each request has been offered.
        self._scheduled: list[Request] = []
        self._offered_blocks: dict[str, int] = {}
        self._offers: OrderedDict[str, Sequence[Any]] = OrderedDict()
        self._prefilled = False
        self._running: dict[int, _Running] = {}
        self._last_number = 0

    # For requests.

    def miss(self, request_id: str) -> None:
        """A waiting request takes what it lacks from elsewhere."""
        self._hits.pop(request_id, None)

    def hit(self, request: "Request", num_computed_tokens: int) -> int:
        """Tokens of a waiting request that host memory has behind those it finds on the device."""
        self.miss(request.request_id)
        count = self._blocks_behind(request, num_computed_tokens)
        if count:
            self._hits[request.request_id] = num_computed_tokens // self._block_size, count
        return count * self._block_size

    def tokens_behind(self, request: "Request", num_computed_tokens: int) -> int:
        """What `hit` would say; changes nothing."""
        return self._blocks_behind(request, num_computed_tokens) * self._block_size

    def _blocks_behind(self, request: "Request", num_computed_tokens: int) -> int:
        remote = (request.kv_transfer_params or {}).get("do_remote_prefill")
        if remote or request.skip_reading_prefix_cache or num_computed_tokens % self._block_size:
            return 0
        # One token at least has to be computed.
        match = self.tiers.match(request.block_hashes[: (request.num_tokens - 1) // self._block_size])
        return len(match.host) if len(match.device) == num_computed_tokens // self._block_size else 0

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
        self._loaded[request.request_id] = count * self._block_size
        self._loads += zip(device_blocks[first : first + count], slots, strict=True)
        return True

    def loaded_tokens(self, request_id: str) -> int:
        """What an admitted request got from host memory. The second call answers 0."""
        return self._loaded.pop(request_id, 0)

    def forget(self, request_id: str) -> None:
        self._hits.pop(request_id, None)
        self._loaded.pop(request_id, None)
        self._offered_blocks.pop(request_id, None)

    # For steps.

    def loads(self) -> SwapCopies:
        """What the step that is being built copies before it computes."""
        loads, self._loads = self._loads, []
        return SwapCopies(back=tuple(loads))

    def background(self) -> list[BackgroundCopy]:
        """Copies that begin with the step that is being built."""
        begun = self._copies_out()
        promotion = self._promotion() if self._prefilled else None
        return [*begun, promotion] if promotion is not None else begun

    def built(self, scheduler_output: "SchedulerOutput") -> None:
        """The step's copies are all decided."""
        self.tiers.let_go(self._held, loaded=True)
        self._held = []
        self._pool.unwritten.clear()
        self._scheduled = [self._requests[name] for name in scheduler_output.num_scheduled_tokens]
        self._prefilled = bool(scheduler_output.scheduled_new_reqs)

    @property
    def has_work(self) -> bool:
        """Whether copies are under way or wait for their turn: a step without requests takes them on."""
        return bool(self._running or self._offers)

    def held_blocks(self) -> "list[KVCacheBlock]":
        """Device blocks that copies in the background refer to, each as often as they do."""
        return [block for each in self._running.values() for block in each.blocks]

    def take_in(self, report: CopyReport) -> None:
        """What the workers say of copies in the background."""
        self.tiers.counters.copy_out_s += report.seconds["out"]
        self.tiers.counters.copy_back_s += report.seconds["back"]
        for number, workers in report.ended.items():
            running = self._running[number]
            running.reports -= workers
            running.failed |= number in report.failed
            if not running.reports:
                del self._running[number]
                self._end(running)

    def _end(self, running: _Running) -> None:
        plan = running.plan
        self.tiers.counters.timed += len(plan.slots) * (not running.failed)
        if isinstance(plan, CopyOut):
            (self.tiers.copy_failed if running.failed else self.tiers.copied_out)(plan)
        elif running.failed:
            self.tiers.promotion_failed(plan)
        else:
            self.tiers.promoted(plan, self._pool.publish(plan.hashes, plan.first, running.blocks[plan.first :]))
        self._pool.free_blocks(reversed(running.blocks))

    def _begin(self, plan: CopyOut | Promotion, blocks: "list[KVCacheBlock]", copies: SwapCopies) -> BackgroundCopy:
        self._last_number += 1
        self._running[self._last_number] = _Running(plan, blocks, self._workers)
        return BackgroundCopy(self._last_number, copies)

    def _copies_out(self) -> list[BackgroundCopy]:
        """Of what the last steps have computed, what is worth it, as far as the budget goes."""
        for request in self._scheduled:
            computed = min(request.num_computed_tokens // self._block_size, len(request.block_hashes))
            if computed == self._offered_blocks.get(request.request_id):
                continue
            if not request.is_finished():
                self._offered_blocks[request.request_id] = computed
            self._offers[request.request_id] = request.block_hashes[:computed]
            self._offers.move_to_end(request.request_id)
        while len(self._offers) > _MOST_OFFERS:
            self._offers.popitem(last=False)
        begun: list[BackgroundCopy] = []
        room = self._budget - sum(len(each.blocks) for each in self._running.values() if isinstance(each.plan, CopyOut))
        while room > 0 and self._offers:
            name, hashes = next(iter(self._offers.items()))
            copy = self.tiers.worth_copying(hashes, room, self._pool.unwritten)
            if copy is None:
                del self._offers[name]
                continue
            room -= len(copy.slots)
            blocks = [self._pool.blocks[each] for each in copy.blocks]
            self._pool.touch(blocks)
            begun.append(self._begin(copy, blocks, SwapCopies(out=tuple(zip(copy.blocks, copy.slots, strict=True)))))
        return begun

    def _promotion(self) -> BackgroundCopy | None:
        """After a prefill, what is hot and not on the device, in place of what is colder there; one at a time."""
        if any(isinstance(each.plan, Promotion) for each in self._running.values()):
            return None
        # Running requests need a block each before it has landed, and prompts that come some as well.
        reserve = len(self._scheduled) + self._pool.num_gpu_blocks // 20
        at_most = (self._pool.get_num_free_blocks() - reserve) // 2
        promotion = self.tiers.promotion(at_most) if at_most > 0 else None
        if promotion is None:
            return None
        before = [self._pool.blocks[each] for each in self.tiers.match(promotion.hashes[: promotion.first]).device]
        self._pool.touch(before)
        taken = self._pool.get_new_blocks(len(promotion.slots))
        pairs = zip([block.block_id for block in taken], promotion.slots, strict=True)
        return self._begin(promotion, [*before, *taken], SwapCopies(back=tuple(pairs)))


class HostTiering(HostSwapping):
    """Mixin for a vLLM connector; goes before it in the bases. Without `attach` it does nothing."""

    host_tier: HostTier | None = None
    _copy_worker: CopyWorker | None = None

    # Scheduler side.

    def use_pool(self, pool: Any) -> None:
        """The scheduler is ready: its pool of device blocks."""

    def attach(
        self, tiers: PrefixTiers, pool: TieredBlockPool, requests: "Mapping[str, Request]", budget: int
    ) -> HostTier:
        """The scheduler is ready: its tiers and its pool, its table of requests. budget: see `HostTier`."""
        self.swaps = SwapLedger(SharedSlots(tiers), self._block_size)
        self.host_tier = HostTier(
            tiers, pool, requests, self._block_size, budget=budget, workers=vllm_private.workers_of(self)
        )
        return self.host_tier

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
