"""Bugs that are planted on purpose, to show that the fuzzers would see them.

Each is a context in which one thing is done wrong. A plant that no fuzzer catches is a hole in the fuzzers.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any
from unittest import mock

from vllm.v1.core.block_pool import BlockPool

from cluster_core.token_prefix import longest_common_prefix
from kv_transfer import vllm_private
from kv_transfer.blocks import Tier
from kv_transfer.host_memory.swap_ledger import SwapCopies, SwapLedger
from kv_transfer.tiers.host_tier import HostTier
from kv_transfer.tiers.prefix_tiers import PrefixTiers
from kv_transfer.tiers.radix_tree import RadixTree
from kv_transfer.tiers.tier_terms import CopyOut, Load, Promotion
from kv_transfer.tiers.tiered_scheduling import TieredScheduling
from prefill_worker import session_input
from prefill_worker.partial_budget import PartialBudget
from prefill_worker.prompt_turns import Mix
from prefill_worker.session_input import SessionInput
from prefill_worker.streaming_request import StreamingRequest
from prefill_worker.two_phase import TwoPhase


def _writes_published_blocks() -> AbstractContextManager[Any]:
    return mock.patch.object(BlockPool, "is_block_writable", lambda pool, block: True)


def _keeps_one_token_too_many() -> AbstractContextManager[Any]:
    def prefix(first: list[int], second: list[int]) -> int:
        return min(longest_common_prefix(first, second) + 1, len(first), len(second))

    return mock.patch.object(session_input, "longest_common_prefix", prefix)


def _adapters_of_a_step_are_not_counted() -> AbstractContextManager[Any]:
    return mock.patch.object(TwoPhase, "_most_adapters", 99)


def _keeps_old_block_hashes() -> AbstractContextManager[Any]:
    apply = SessionInput._apply

    def apply_and_keep(self: Any, request: Any, given: Any) -> None:
        before = list(request.block_hashes)
        apply(self, request, given)
        known = len(request.block_hashes)
        request.block_hashes[: len(before[:known])] = before[:known]

    return mock.patch.object(SessionInput, "_apply", apply_and_keep)


def _update_forgets_host_copies() -> AbstractContextManager[Any]:
    shorten = SwapLedger.shorten
    return mock.patch.object(
        SwapLedger, "shorten", lambda self, name, tokens: 0 if tokens else shorten(self, name, tokens)
    )


def _swap_in_is_skipped() -> AbstractContextManager[Any]:
    take_copies = SwapLedger.take_copies
    return mock.patch.object(SwapLedger, "take_copies", lambda self: SwapCopies(out=take_copies(self).out))


@contextmanager
def _swap_out_comes_late() -> Iterator[None]:
    take_copies = SwapLedger.take_copies
    late: dict[int, tuple[tuple[int, int], ...]] = {}

    def take_late(self: SwapLedger) -> SwapCopies:
        copies = take_copies(self)
        out, late[id(self)] = late.get(id(self), ()), copies.out
        return SwapCopies(out, copies.back)

    with mock.patch.object(SwapLedger, "take_copies", take_late):
        yield


def _resumes_from_the_wrong_slot() -> AbstractContextManager[Any]:
    take_slots = SwapLedger.take_slots

    def shifted(self: SwapLedger, request_id: str, first_block: int) -> list[int]:
        first, *others = take_slots(self, request_id, first_block)
        return [*others, first]

    return mock.patch.object(SwapLedger, "take_slots", shifted)


def _dropped_copies_stay() -> AbstractContextManager[Any]:
    return mock.patch.object(SwapLedger, "drop", lambda self, name: None)


def _model_runner_is_not_told() -> AbstractContextManager[Any]:
    apply = SessionInput._apply

    def apply_silently(self: Any, request: Any, given: Any) -> None:
        told_before = request.request_id in self.reset_preempted_req_ids
        apply(self, request, given)
        if not told_before:
            self.reset_preempted_req_ids.discard(request.request_id)

    return mock.patch.object(SessionInput, "_apply", apply_silently)


def _loses_a_block() -> AbstractContextManager[Any]:
    truncate = vllm_private.truncate_blocks

    def truncate_and_lose(scheduler: Any, request: Any, keep_tokens: int) -> int:
        blocks = vllm_private.request_blocks(scheduler, request.request_id)
        if keep_tokens < (len(blocks) - 1) * scheduler.block_size:
            blocks.pop()
        return truncate(scheduler, request, keep_tokens)

    return mock.patch.object(vllm_private, "truncate_blocks", truncate_and_lose)


def _input_does_not_wait_for_loads() -> AbstractContextManager[Any]:
    return mock.patch.object(session_input, "LOADING", None)


def _answers_before_input_is_closed() -> AbstractContextManager[Any]:
    nothing_held = property(lambda self: 0, lambda self, value: None)
    return mock.patch.object(StreamingRequest, "held_tokens", nothing_held)


@contextmanager
def _copies_what_is_not_written() -> Iterator[None]:
    background, worth_copying = HostTier.background, PrefixTiers.worth_copying

    def offer_everything(self: HostTier) -> Any:
        self._offers.update((name, request.block_hashes) for name, request in self._requests.items())
        return background(self)

    def overlook(self: PrefixTiers, hashes: Any, at_most: int, unwritten: Any) -> CopyOut | None:
        return worth_copying(self, hashes, at_most)

    with (
        mock.patch.object(HostTier, "background", offer_everything),
        mock.patch.object(PrefixTiers, "worth_copying", overlook),
    ):
        yield


def _copies_hold_no_blocks() -> AbstractContextManager[Any]:
    begin = HostTier._begin

    def begin_and_let_go(self: HostTier, plan: Any, blocks: Any, copies: SwapCopies) -> Any:
        if isinstance(plan, CopyOut):
            self._pool.free_blocks(reversed(blocks))
            blocks = []
        return begin(self, plan, blocks, copies)

    return mock.patch.object(HostTier, "_begin", begin_and_let_go)


def _failed_copies_count_as_landed() -> AbstractContextManager[Any]:
    take_in = HostTier.take_in
    return mock.patch.object(HostTier, "take_in", lambda self, report: take_in(self, replace(report, failed=set())))


def _promotions_are_there_too_early() -> AbstractContextManager[Any]:
    begin = HostTier._begin

    def begin_and_publish(self: HostTier, plan: Any, blocks: Any, copies: SwapCopies) -> Any:
        if isinstance(plan, Promotion):
            self._pool.publish(plan.hashes, plan.first, blocks[plan.first :])
        return begin(self, plan, blocks, copies)

    return mock.patch.object(HostTier, "_begin", begin_and_publish)


def _copies_are_there_too_early() -> AbstractContextManager[Any]:
    begin = HostTier._begin

    def begin_and_tell(self: HostTier, plan: Any, blocks: Any, copies: SwapCopies) -> Any:
        if isinstance(plan, CopyOut):
            self.tiers.slots.refer(plan.slots)
            self.tiers.tree.insert(Tier.HOST, plan.hashes, plan.first, plan.slots)
        return begin(self, plan, blocks, copies)

    return mock.patch.object(HostTier, "_begin", begin_and_tell)


def _lands_at_once(method: str) -> AbstractContextManager[Any]:
    """What this one of `HostTier` begins is said to have landed at once, and nothing when it has."""
    begin, end, take_landed = getattr(HostTier, method), HostTier._end_load, HostTier.take_landed
    early: set[str] = set()

    def begin_and_tell(self: HostTier, whose: Any, *copied: Any) -> Any:
        begun = begin(self, whose, *copied)
        name = whose if isinstance(whose, str) else whose.request_id
        if self.is_loading(name):
            self._landed.add(name)
        return begun

    def take_and_note(self: HostTier) -> set[str]:
        landed = take_landed(self)
        early.update(landed)
        return landed

    def end_silently(self: HostTier, plan: Load, *, failed: bool) -> None:
        end(self, plan, failed=failed)
        if plan.request_id in early:
            early.remove(plan.request_id)
            self._landed.discard(plan.request_id)

    tells: dict[str, Any] = {method: begin_and_tell, "take_landed": take_and_note, "_end_load": end_silently}
    return mock.patch.multiple(HostTier, **tells)


def _failed_loads_are_not_computed() -> AbstractContextManager[Any]:
    return mock.patch.object(TieredScheduling, "_compute_instead", lambda self, request, tokens: None)


def _loads_hold_no_slots() -> AbstractContextManager[Any]:
    begin, end = HostTier._begin, HostTier._end_load

    def begin_and_let_go(self: HostTier, plan: Any, blocks: Any, copies: SwapCopies) -> Any:
        if isinstance(plan, Load) and not plan.is_swapped:
            self.tiers.let_go(plan.slots, loaded=False)
        return begin(self, plan, blocks, copies)

    def hold_and_end(self: HostTier, load: Load, *, failed: bool) -> None:
        if not load.is_swapped:
            self.tiers.hold([each for each in load.slots if self.tiers.slots.count(each)])
        end(self, load, failed=failed)

    return mock.patch.multiple(HostTier, _begin=begin_and_let_go, _end_load=hold_and_end)


def _loads_from_the_wrong_slot() -> AbstractContextManager[Any]:
    host_slots_of = PrefixTiers.host_slots_of

    def shifted(self: PrefixTiers, hashes: Any, first: int, count: int) -> list[int]:
        slots = host_slots_of(self, hashes, first, count)
        return [*slots[1:], slots[0]]

    return mock.patch.object(PrefixTiers, "host_slots_of", shifted)


def _blocks_that_come_back_count_twice() -> AbstractContextManager[Any]:
    adopt = RadixTree._adopt

    def adopt_and_count(self: RadixTree, node: Any, offset: int, length: int, tier: Tier, ids: Any) -> Any:
        adopted = adopt(self, node, offset, length, tier, ids)
        adopted.owner.blocks[tier] += length
        return adopted

    return mock.patch.object(RadixTree, "_adopt", adopt_and_count)


def _plans_do_not_see_host_memory() -> AbstractContextManager[Any]:
    return mock.patch.object(TieredScheduling, "tokens_in_host_memory", lambda self, request, device_tokens: 0)


def _who_is_held_back_is_never_overdue() -> AbstractContextManager[Any]:
    most_tokens = PartialBudget.most_tokens

    def of_what_is_worth_it(self: PartialBudget, each: Any) -> int:
        self.overdue_since_s = -inf
        return most_tokens(self, each)

    return mock.patch.object(PartialBudget, "most_tokens", of_what_is_worth_it)


def _newcomers_take_more_than_granted() -> AbstractContextManager[Any]:
    limit = TwoPhase._limit

    def limit_holders(self: Any, plan: Any) -> list[Any]:
        limited = limit(self, plan)
        for request in limited:
            if not request.num_computed_tokens:
                request.step_limit = None
        return limited

    return mock.patch.object(TwoPhase, "_limit", limit_holders)


def _who_is_gone_takes_turns() -> AbstractContextManager[Any]:
    return mock.patch.object(Mix, "left", lambda self, name: None)


@dataclass(frozen=True, slots=True)
class Plant:
    """real: whether a real engine on a CPU, whose runner is V1 and which loads nothing, can show it."""

    breaks: str
    planted: Callable[[], AbstractContextManager[Any]]
    real: bool = True


PLANTS: Mapping[str, Plant] = {
    "writes_published_blocks": Plant(
        "an update writes into a block that others find in the prefix cache", _writes_published_blocks
    ),
    "keeps_one_token_too_many": Plant(
        "an update keeps the KV of the first token that differs", _keeps_one_token_too_many
    ),
    "keeps_old_block_hashes": Plant(
        "after an update new KV is published under the old prompt's hashes", _keeps_old_block_hashes
    ),
    "update_forgets_host_copies": Plant(
        "an update of a swapped session leaves the old prompt's KV in host memory", _update_forgets_host_copies
    ),
    "swap_in_is_skipped": Plant("a resumed session's KV is never copied back", _swap_in_is_skipped),
    "swap_out_comes_late": Plant(
        "blocks are copied to host memory a step late, when others have written them", _swap_out_comes_late
    ),
    "dropped_copies_stay": Plant("host slots of sessions that are gone are never freed", _dropped_copies_stay),
    "model_runner_is_not_told": Plant(
        "V2 only: the model runner does not hear that a session comes again as new",
        _model_runner_is_not_told,
        real=False,
    ),
    "input_does_not_wait_for_loads": Plant(
        "an update frees blocks into which a load is still being written", _input_does_not_wait_for_loads, real=False
    ),
    "answers_before_input_is_closed": Plant(
        "a session's last known token is computed while more may come", _answers_before_input_is_closed
    ),
    "copies_what_is_not_written": Plant(
        "blocks are copied to host memory before the step that computes them", _copies_what_is_not_written
    ),
    "copies_hold_no_blocks": Plant(
        "a device block is taken by another request while it is copied to host memory",
        _copies_hold_no_blocks,
        real=False,
    ),
    "blocks_that_come_back_count_twice": Plant(
        "a tenant has more of a tier, as counted, when its blocks come to it again",
        _blocks_that_come_back_count_twice,
        real=False,
    ),
    "failed_copies_count_as_landed": Plant(
        "rubbish that a failed copy left is found in the cache", _failed_copies_count_as_landed, real=False
    ),
    "promotions_are_there_too_early": Plant(
        "a request reads promoted blocks before their bytes have landed", _promotions_are_there_too_early, real=False
    ),
    "copies_are_there_too_early": Plant(
        "a request loads from host memory what is still on its way there", _copies_are_there_too_early, real=False
    ),
    "adapters_of_a_step_are_not_counted": Plant(
        "a step computes more adapters than it has places for", _adapters_of_a_step_are_not_counted, real=False
    ),
    "loads_are_there_too_early": Plant(
        "a request reads blocks before what is loaded for it asynchronously has landed",
        partial(_lands_at_once, "load"),
        real=False,
    ),
    "resumes_are_there_too_early": Plant(
        "a swapped session reads its blocks before they have come back", partial(_lands_at_once, "resume"), real=False
    ),
    "resumes_from_the_wrong_slot": Plant(
        "a swapped session's blocks come back in a wrong order", _resumes_from_the_wrong_slot, real=False
    ),
    "failed_loads_are_not_computed": Plant(
        "a request reads the rubbish that a failed load has left", _failed_loads_are_not_computed, real=False
    ),
    "loads_hold_no_slots": Plant(
        "a host slot is written by another copy while it is loaded from", _loads_hold_no_slots, real=False
    ),
    "loads_from_the_wrong_slot": Plant("host blocks are loaded in a wrong order", _loads_from_the_wrong_slot),
    "plans_do_not_see_host_memory": Plant(
        "a prompt whose prefix lies in host memory gets fewer blocks than its loads need, and starves",
        _plans_do_not_see_host_memory,
        real=False,
    ),
    "who_is_held_back_is_never_overdue": Plant(
        "an open session of which nothing is likely to stay waits for its end, however far that is",
        _who_is_held_back_is_never_overdue,
        real=False,
    ),
    "newcomers_take_more_than_granted": Plant(
        "an open session that holds nothing wants all its blocks where room was made for its grant, and starves",
        _newcomers_take_more_than_granted,
        real=False,
    ),
    "who_is_gone_takes_turns": Plant(
        "steps are short for tenants that are not there any more, for good", _who_is_gone_takes_turns, real=False
    ),
    # The last: no engine recovers from it.
    "loses_a_block": Plant("an update that frees blocks forgets one of them", _loses_a_block),
}
