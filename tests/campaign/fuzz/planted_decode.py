"""Bugs of the decode scheduler, planted on purpose to show that its fuzzer would see them.

Each is a context in which one thing is done wrong, as in `tests.campaign.fuzz.planted`.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from decode_worker import chunk_hashes
from decode_worker.batch_members import Member, Plan
from decode_worker.batch_scheduling import BatchScheduling
from decode_worker.batch_shares import BatchShares
from decode_worker.batching import Batching
from decode_worker.gated_queue import GatedQueue
from kv_transfer.between_steps import LookingStep
from kv_transfer.handoff.emitted_output import EmittedOutput, emitted_of
from tests.campaign.fuzz.planted import Plant


def _settle_forgets_to_put_back() -> AbstractContextManager[Any]:
    def forget(self: Batching, member: Member) -> None:
        self.tree.discard(member.request_id)

    return mock.patch.object(Batching, "_return_to_tree", forget)


def _refused_requests_count_as_admitted() -> AbstractContextManager[Any]:
    settle = Batching.settle

    def admit_all(
        self: Batching, plan: Plan, admitted: Collection[str], loading: Collection[str], now_s: float
    ) -> None:
        settle(self, plan, plan.request_ids, loading, now_s)

    return mock.patch.object(Batching, "settle", admit_all)


def _loads_are_not_told() -> AbstractContextManager[Any]:
    settle = Batching.settle

    def settle_without(
        self: Batching, plan: Plan, admitted: Collection[str], loading: Collection[str], now_s: float
    ) -> None:
        settle(self, plan, admitted, (), now_s)

    return mock.patch.object(Batching, "settle", settle_without)


def _preempted_requests_are_not_told() -> AbstractContextManager[Any]:
    return mock.patch.object(Batching, "preempted", lambda self, request_id, now_s: None)


def _who_is_gone_is_not_told() -> AbstractContextManager[Any]:
    return mock.patch.object(Batching, "gone", lambda self, request_id: False)


def _failed_loads_are_never_noticed() -> AbstractContextManager[Any]:
    def note_ends(self: Any, batching: Batching, now_s: float) -> None:
        waiting = self.waiting
        self.waiting = list(batching.waiting())
        note_loads(self, batching, now_s)
        self.waiting = waiting

    note_loads: Callable[..., None] = BatchScheduling._note_loads
    return mock.patch.object(BatchScheduling, "_note_loads", note_ends)


def _failed_loads_count_as_landed() -> AbstractContextManager[Any]:
    return mock.patch.object(Scheduler, "_handle_failed_recving", lambda self, failed: set())


def _partly_failed_loads_count_as_landed() -> AbstractContextManager[Any]:
    return mock.patch.object(Scheduler, "_handle_invalid_blocks", lambda self, blocks, scheduled: set())


def _the_gate_shows_a_request_twice() -> AbstractContextManager[Any]:
    def pop_a_copy(self: GatedQueue) -> Request:
        request = self.peek_request()
        if self._shown is not None:
            self._shown.pop()
        return request

    return mock.patch.object(GatedQueue, "pop_request", pop_a_copy)


def _the_gate_loses_who_was_skipped() -> AbstractContextManager[Any]:
    return mock.patch.object(GatedQueue, "prepend_requests", lambda self, requests: None)


def _hashes_ignore_the_salt() -> AbstractContextManager[Any]:
    def of_tokens(self: Any, request: Request) -> Sequence[bytes]:
        hashes = chunk_hashes.of_tokens(request.prompt_token_ids or (), self.chunk_tokens)
        return [each.to_bytes(8, "little") for each in hashes]

    return mock.patch.object(BatchScheduling, "_hashes", of_tokens)


def _hashes_cover_the_wrong_blocks() -> AbstractContextManager[Any]:
    def one_too_early(block_hashes: Sequence[bytes], blocks_per_chunk: int) -> list[bytes]:
        return list(block_hashes[max(0, blocks_per_chunk - 2) :: blocks_per_chunk])

    return mock.patch.object(chunk_hashes, "of_blocks", one_too_early)


def _emitted_output_stays_unknown() -> AbstractContextManager[Any]:
    return mock.patch.object(EmittedOutput, "add_request", Scheduler.add_request)


def _emitted_output_is_counted_as_cached_prompt() -> AbstractContextManager[Any]:
    def add_request(self: Any, request: Request) -> None:
        emitted = emitted_of(request.sampling_params)
        if emitted and not request.num_output_tokens:
            request.append_output_token_ids(emitted)
        Scheduler.add_request(self, request)

    return mock.patch.object(EmittedOutput, "add_request", add_request)


def _hashes_ignore_the_adapter() -> AbstractContextManager[Any]:
    return mock.patch.object(kv_cache_utils, "_gen_lora_extra_hash_keys", lambda request: [])


def _who_does_not_wait_is_furthest_behind() -> AbstractContextManager[Any]:
    left = BatchShares.left

    def left_but_stays(self: BatchShares, member: Member) -> None:
        left(self, member)
        self.waits(member)

    return mock.patch.object(BatchShares, "left", left_but_stays)


@contextmanager
def _failures_between_steps_are_not_told() -> Iterator[None]:
    look = LookingStep._look

    def forgetful(self: LookingStep) -> dict[int, Any]:
        told = KVConnectorOutput.__init__

        def without_failures(output: Any, **fields: Any) -> None:
            told(output, **{**fields, "failed_recving": set(), "invalid_block_ids": set()})

        with mock.patch.object(KVConnectorOutput, "__init__", without_failures):
            return look(self)

    with mock.patch.object(LookingStep, "_look", forgetful):
        yield


DECODE_PLANTS: Mapping[str, Plant] = {
    "emitted_output_stays_unknown": Plant("an answer begins again", _emitted_output_stays_unknown),
    "emitted_output_is_counted_as_cached_prompt": Plant(
        "vLLM ends where it finds more in the caches than the prompt",
        _emitted_output_is_counted_as_cached_prompt,
    ),
    "settle_forgets_to_put_back": Plant(
        "who was refused or preempted is never planned again", _settle_forgets_to_put_back
    ),
    "refused_requests_count_as_admitted": Plant(
        "who found no memory runs for the core, and waits for vLLM", _refused_requests_count_as_admitted
    ),
    "loads_are_not_told": Plant("the core takes a request that is being pulled for one that runs", _loads_are_not_told),
    "preempted_requests_are_not_told": Plant(
        "a preempted request runs for the core, and waits for vLLM", _preempted_requests_are_not_told
    ),
    "who_is_gone_is_not_told": Plant("the core knows requests that have ended", _who_is_gone_is_not_told),
    "failed_loads_are_never_noticed": Plant(
        "who is put back after its load failed is never planned again", _failed_loads_are_never_noticed
    ),
    "failed_loads_count_as_landed": Plant("a request decodes with KV that never came", _failed_loads_count_as_landed),
    "partly_failed_loads_count_as_landed": Plant(
        "a request decodes with blocks that never came", _partly_failed_loads_count_as_landed
    ),
    "failures_between_steps_are_not_told": Plant(
        "what is looked for between two steps counts as landed though it has failed",
        _failures_between_steps_are_not_told,
    ),
    "the_gate_shows_a_request_twice": Plant("an admitted request is admitted again", _the_gate_shows_a_request_twice),
    "the_gate_loses_who_was_skipped": Plant("who could not be taken yet is gone", _the_gate_loses_who_was_skipped),
    "who_does_not_wait_is_furthest_behind": Plant(
        "who has joined or is gone is chosen for its tenant's share", _who_does_not_wait_is_furthest_behind
    ),
    "hashes_ignore_the_salt": Plant("prompts share a prefix whose salts are different", _hashes_ignore_the_salt),
    "hashes_ignore_the_adapter": Plant("the KV of an adapter is found by all", _hashes_ignore_the_adapter),
    "hashes_cover_the_wrong_blocks": Plant(
        "prompts share a chunk that differs in its end", _hashes_cover_the_wrong_blocks
    ),
}
