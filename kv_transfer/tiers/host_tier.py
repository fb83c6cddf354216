"""The host tier of one scheduler: what is copied when, and who waits for it; a shell around `prefix_tiers`.

Loads that a step waits for travel with the copies of host swap and run at its start, before anything is computed
(`kv_transfer.host_memory.host_swap`). The other copies run in the background and take as many steps as they need
(`kv_transfer.host_memory.copy_worker`); until the workers report them, what they read and write belongs to them:
    loaded         host slots, held until the step that reads them is built, to blocks of a request that is admitted
    loaded async   host slots, referenced, to blocks of a request that vLLM lets wait, as for KV of another worker
    resumed async  the slots of a swapped request, which are nobody else's, likewise
    copied out     blocks whose KV an earlier step has written, referenced; the slots are in no tree yet
    promoted       host slots, referenced, to blocks taken from the pool and not yet published
Whoever would load what is being loaded or promoted waits until it has landed, and shares its blocks. A request whose
load failed computes what it lacks.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cluster_core.clock import monotonic_s
from kv_transfer.host_memory.copy_worker import BackgroundCopy, CopyReport
from kv_transfer.host_memory.swap_ledger import SwapCopies
from kv_transfer.tiers.device_pool import TieredBlockPool
from kv_transfer.tiers.prefix_tiers import PrefixTiers
from kv_transfer.tiers.tier_terms import CopyOut, Load, Promotion

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

# Prefixes that wait for their turn to be copied out; the oldest are given up.
_MOST_OFFERS = 256


@dataclass(slots=True)
class _Running:
    """A copy in the background."""

    plan: CopyOut | Load | Promotion
    # Device blocks that it holds; those of a load are its request's.
    blocks: "list[KVCacheBlock]"
    # Of so many workers are still due.
    reports: int
    failed: bool = False


class HostTier:
    """The tiers of one scheduler, as its connector drives them.

    budget: blocks on their way to host memory at most. workers: of the engine, each of which makes every copy.
    goes_async(blocks, turned_away): whether a load of so many is asynchronous; turned_away: it should have been before,
    and vLLM had no room for its request.
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
        goes_async: "Callable[[int, bool], bool]",
    ) -> None:
        self.tiers = tiers
        self._pool = pool
        self._requests = requests
        self._block_size = block_size
        self._budget = budget
        self._workers = workers
        self._goes_async = goes_async
        # Of a waiting request: its first block that can be loaded from host memory, how many, and whether async.
        self._hits: dict[str, tuple[int, int, bool]] = {}
        # Of a swapped request that waits: whether what it has in its slots is to be loaded asynchronously.
        self._resumes: dict[str, bool] = {}
        self._loads: list[tuple[int, int]] = []
        # Tokens that were loaded for a request when it was last admitted.
        self._loaded: dict[str, int] = {}
        self._held: list[int] = []
        # Asynchronous loads: those that begin with the step that is being built, what is on its way, whose has landed
        # since vLLM was last told, and the tokens that requests have whose load has failed since they were last told.
        self._begun: list[BackgroundCopy] = []
        self._arriving: set[Any] = set()
        self._landed: set[str] = set()
        self._failed: dict[str, int] = {}
        # Requests that load nothing any more.
        self._computing: set[str] = set()
        # Scheduled by the step before, and the last block of each request that has been offered.
        self._scheduled: list[Request] = []
        self._offered: dict[str, Any] = {}
        self._offers: OrderedDict[str, Sequence[Any]] = OrderedDict()
        self._prefilled = False
        self._running: dict[int, _Running] = {}
        self._last_number = 0
        # When the oldest copy under way began, or the last one before it ended.
        self._copying_since_s = 0.0

    # For requests.

    def miss(self, request_id: str) -> None:
        """A waiting request takes what it lacks from elsewhere."""
        self._resumes.pop(request_id, None)
        self._hits.pop(request_id, None)
        self._loaded.pop(request_id, None)

    def hit(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens of a waiting request that host memory has behind those it finds on the device, and whether they are
        loaded asynchronously. None: they are on their way already."""
        _, _, turned_away = self._hits.get(request.request_id, (0, 0, False))
        self.miss(request.request_id)
        if self.is_arriving(request, num_computed_tokens):
            return None, False
        count = self._blocks_behind(request, num_computed_tokens)
        if not count:
            return 0, False
        first = num_computed_tokens // self._block_size
        is_async = self._goes_async(count, turned_away)
        self._hits[request.request_id] = first, count, is_async
        return count * self._block_size, is_async

    @property
    def block_copy_s(self) -> float | None:
        """What a block takes, either way, as copies in the background have taken; None before the first has ended."""
        counters = self.tiers.counters
        if not counters.timed:
            return None
        return (counters.copy_out_s + counters.copy_back_s) / (counters.timed * self._workers)

    def resumes_async(self, request_id: str, count: int) -> bool:
        """Whether a swapped request, should it be admitted now, gets so many blocks asynchronously."""
        turned_away = self._resumes.get(request_id, False)
        self.miss(request_id)
        is_async = self._resumes[request_id] = self._goes_async(count, turned_away)
        return is_async

    def admits_async(self, request_id: str) -> bool:
        """What `resumes_async` said last of a swapped request that is admitted."""
        return self._resumes.pop(request_id, False)

    def resume(self, request: "Request", first: int, device_blocks: "Sequence[int]", slots: "Sequence[int]") -> None:
        """A swapped request is admitted: from these slots, which are ours now, to its blocks from number `first` on."""
        hashes = tuple(request.block_hashes[: first + len(slots)])
        self._load_async(Load(request.request_id, hashes, first, tuple(slots), is_swapped=True), device_blocks)

    def _load_async(self, load: Load, device_blocks: "Sequence[int]") -> None:
        self._arriving.update(load.hashes[load.first :])
        pairs = tuple(zip(device_blocks, load.slots, strict=True))
        self._begun.append(self._begin(load, [], SwapCopies(back=pairs)))

    def tokens_behind(self, request: "Request", num_computed_tokens: int) -> int:
        """What `hit` would find; changes nothing."""
        return self._blocks_behind(request, num_computed_tokens) * self._block_size

    def is_arriving(self, request: "Request", num_computed_tokens: int) -> bool:
        """Whether its next block behind those that it finds on the device is being loaded for others, or promoted."""
        first = num_computed_tokens // self._block_size
        readable = self._readable(request, num_computed_tokens)
        return first < len(readable) and readable[first] in self._arriving

    def _blocks_behind(self, request: "Request", num_computed_tokens: int) -> int:
        match = self.tiers.match(self._readable(request, num_computed_tokens))
        return len(match.host) if len(match.device) == num_computed_tokens // self._block_size else 0

    def _readable(self, request: "Request", num_computed_tokens: int) -> "Sequence[Any]":
        """The hashes of those blocks of its prompt that it may read from here."""
        remote = (request.kv_transfer_params or {}).get("do_remote_prefill") or request.request_id in self._computing
        if remote or request.skip_reading_prefix_cache or num_computed_tokens % self._block_size:
            return ()
        # One token at least has to be computed.
        hashes: Sequence[Any] = request.block_hashes[: (request.num_tokens - 1) // self._block_size]
        return hashes

    def load(self, request: "Request", blocks: "KVCacheBlocks") -> bool:
        """The request is admitted and has got these device blocks. False: it reads nothing from here."""
        first, count, is_async = self._hits.pop(request.request_id, (0, 0, False))
        if not count:
            return False
        slots = self.tiers.host_slots_of(request.block_hashes, first, count)
        assert len(slots) == count, "a host hit has gone while its request was admitted"
        (device_blocks,) = blocks.get_block_ids()
        self.tiers.hold(slots)
        self._loaded[request.request_id] = count * self._block_size
        lacked = device_blocks[first : first + count]
        if is_async:
            hashes = tuple(request.block_hashes[: first + count])
            self._load_async(Load(request.request_id, hashes, first, tuple(slots)), lacked)
        else:
            self._held += slots
            self._loads += zip(lacked, slots, strict=True)
        return True

    def is_loading(self, request_id: str) -> bool:
        """Whether it waits for an asynchronous load."""
        return any(
            isinstance(each.plan, Load) and each.plan.request_id == request_id for each in self._running.values()
        )

    def take_landed(self) -> set[str]:
        """Requests whose asynchronous loads have ended since the last call, one way or the other."""
        landed, self._landed = self._landed, set()
        return landed

    def take_failed(self) -> dict[str, int]:
        """Of those whose loads have failed since the last call: how many of their tokens have KV."""
        failed, self._failed = self._failed, {}
        return failed

    def loaded_tokens(self, request_id: str) -> int:
        """What an admitted request got from host memory. The second call answers 0."""
        return self._loaded.pop(request_id, 0)

    def forget(self, request_id: str) -> None:
        self.miss(request_id)
        self._offered.pop(request_id, None)
        self._computing.discard(request_id)

    # For steps.

    def loads(self) -> SwapCopies:
        """What the step that is being built copies before it computes."""
        loads, self._loads = self._loads, []
        return SwapCopies(back=tuple(loads))

    def background(self) -> list[BackgroundCopy]:
        """Copies that begin with the step that is being built."""
        begun, self._begun = [*self._begun, *self._copies_out()], []
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

    @property
    def copying_since_s(self) -> float | None:
        """Since when a copy is due, on the monotonic clock; None where none is under way."""
        return self._copying_since_s if self._running else None

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
                # Of all workers: they carry copies out in one order.
                self._copying_since_s = monotonic_s()
                del self._running[number]
                self._end(running)

    def _end(self, running: _Running) -> None:
        plan = running.plan
        if not isinstance(plan, CopyOut):
            self._arriving.difference_update(plan.hashes[plan.first :])
        self.tiers.counters.timed += len(plan.slots) * (not running.failed)
        if isinstance(plan, CopyOut) and running.failed:
            self.tiers.copy_failed(plan)
            # The same would be tried without an end: it is offered again by whoever asks for it again.
            failed = plan.hashes[plan.first]
            for name in [name for name, each in self._offers.items() if failed in each[plan.first : plan.first + 1]]:
                del self._offers[name]
        elif isinstance(plan, CopyOut):
            self.tiers.copied_out(plan)
        elif isinstance(plan, Load):
            self._end_load(plan, failed=running.failed)
        elif running.failed:
            self.tiers.promotion_failed(plan)
        else:
            self.tiers.promoted(plan, self._pool.publish(plan.hashes, plan.first, running.blocks[plan.first :]))
        self._pool.free_blocks(reversed(running.blocks))

    def _end_load(self, load: Load, *, failed: bool) -> None:
        # Those of a swapped session are free with that, as nobody else refers to them.
        self.tiers.let_go(load.slots, loaded=not failed)
        self.tiers.counters.copied_back_async += len(load.slots) * (not failed)
        self._landed.add(load.request_id)
        if failed:
            self.tiers.counters.copies_failed += len(load.slots)
            self._failed[load.request_id] = load.first * self._block_size
            self._loaded.pop(load.request_id, None)
            if not self._requests[load.request_id].is_finished():
                self._computing.add(load.request_id)

    def _begin(
        self, plan: CopyOut | Load | Promotion, blocks: "list[KVCacheBlock]", copies: SwapCopies
    ) -> BackgroundCopy:
        self._last_number += 1
        if not self._running:
            self._copying_since_s = monotonic_s()
        self._running[self._last_number] = _Running(plan, blocks, self._workers)
        return BackgroundCopy(self._last_number, copies)

    def _copies_out(self) -> list[BackgroundCopy]:
        """Of what the last steps have computed, what is worth it, as far as the budget goes."""
        for request in self._scheduled:
            computed = min(request.num_computed_tokens // self._block_size, len(request.block_hashes))
            # Of one that was preempted meanwhile, what it had computed is offered still.
            if not computed or request.block_hashes[computed - 1] == self._offered.get(request.request_id):
                continue
            if not request.is_finished():
                self._offered[request.request_id] = request.block_hashes[computed - 1]
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
        self._arriving.update(promotion.hashes[promotion.first :])
        return self._begin(promotion, [*before, *taken], SwapCopies(back=tuple(pairs)))
