"""Bugs of a scheduler that does both, planted on purpose to show that its fuzzer would see them.

Each is a context in which one thing is done wrong, as in `tests.campaign.fuzz.planted`.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

from vllm.v1.core.sched.scheduler import Scheduler

from cluster_core.objectives import RequestClass
from decode_worker import chunk_bounding
from decode_worker.chunk_bounding import ChunkBounding, _Begun
from decode_worker.step_bound import Chunk, Limit, PromptWork, StepRoom
from prefill_worker.policies import Contender
from prefill_worker.prompt_turns import PromptTurns
from shared_worker.engine_scheduler import SharedMixin
from tests.campaign.fuzz.kv_checking_runner import KvCheckingRunner
from tests.campaign.fuzz.planted import PLANTS, Plant
from tests.campaign.fuzz.slow_load import SlowLoadConnector


def _the_bound_is_ignored() -> AbstractContextManager[Any]:
    def all_of_it(prompts: Sequence[PromptWork], seconds: Any, bound_s: float, room: StepRoom, spare: float) -> Chunk:
        return Chunk(min(room.most_tokens, sum(prompt.left_tokens for prompt in prompts)), Limit.WORK)

    return mock.patch.object(chunk_bounding, "bounded_chunk", all_of_it)


def _a_late_prompt_takes_what_decodes_have_not_to_spare() -> AbstractContextManager[Any]:
    return mock.patch.object(chunk_bounding, "spare_s", lambda each_s: math.inf)


def _the_step_that_runs_counts_for_nothing() -> AbstractContextManager[Any]:
    def as_of_now(self: Any, decoding: Iterable[Any], now_s: float) -> Iterator[tuple[int, float]]:
        for each in decoding:
            begun = self._decoding_since.get(each.request_id)
            yield (each.num_output_tokens - begun.tokens, now_s - begun.at_s) if begun is not None else (0, 0.0)

    return mock.patch.object(ChunkBounding, "_progress", as_of_now)


def _what_others_have_answered_counts_as_decoded_here() -> AbstractContextManager[Any]:
    return mock.patch.object(chunk_bounding, "_Begun", lambda at_s, tokens: _Begun(at_s, 1))


def _running_prompts_are_not_limited() -> AbstractContextManager[Any]:
    return mock.patch.object(chunk_bounding, "limit", lambda request, tokens: None)


def _limits_outlive_their_step() -> AbstractContextManager[Any]:
    return mock.patch.object(chunk_bounding, "lift", lambda request: None)


@contextmanager
def _landed_requests_wait_in_line() -> Iterator[None]:
    with (
        mock.patch.object(ChunkBounding, "_has_landed", lambda self, request: False),
        mock.patch.object(SharedMixin, "_needs_one_token", lambda self, request: False),
    ):
        yield


def _what_landed_in_part_counts_as_whole() -> AbstractContextManager[Any]:
    update = Scheduler._update_waiting_for_remote_kv

    def update_too_far(self: Any, request: Any) -> None:
        update(self, request)
        if request.num_computed_tokens:
            request.num_computed_tokens = min(
                request.num_tokens - 1, self.block_size * -(-request.num_computed_tokens // self.block_size)
            )

    return mock.patch.object(Scheduler, "_update_waiting_for_remote_kv", update_too_far)


def _plans_do_not_heed_the_decode_batch() -> AbstractContextManager[Any]:
    return mock.patch.object(SharedMixin, "_is_held_back", lambda self, request: False)


def _leased_blocks_are_free_at_once() -> AbstractContextManager[Any]:
    finished = SlowLoadConnector.request_finished

    def free_at_once(self: Any, request: Any, block_ids: Any) -> tuple[bool, None]:
        finished(self, request, block_ids)
        return False, None

    return mock.patch.object(SlowLoadConnector, "request_finished", free_at_once)


def _all_are_taken_for_best_effort() -> AbstractContextManager[Any]:
    return mock.patch.object(chunk_bounding, "class_of", lambda priority: RequestClass.BEST_EFFORT)


def _prompts_keep_their_blocks_before_what_has_landed() -> AbstractContextManager[Any]:
    begun = PromptTurns.begun

    def prompts_first(self: PromptTurns, by_policy: Sequence[Contender]) -> list[Contender]:
        return begun(self, sorted(by_policy, key=lambda each: each.remaining_tokens <= 1))

    return mock.patch.object(PromptTurns, "begun", prompts_first)


@contextmanager
def _pulls_do_not_wait_for_copies_out() -> Iterator[None]:
    copy, begin_loads = KvCheckingRunner._copy, KvCheckingRunner._begin_loads
    with (
        mock.patch.object(KvCheckingRunner, "_copy", begin_loads),
        mock.patch.object(KvCheckingRunner, "_begin_loads", copy),
    ):
        yield


SHARED_PLANTS: Mapping[str, Plant] = {
    "the_bound_is_ignored": Plant("a step beside decodes computes all it can of prompts", _the_bound_is_ignored),
    "a_late_prompt_takes_what_decodes_have_not_to_spare": Plant(
        "whoever decodes beside a late prompt loses its TPOT", _a_late_prompt_takes_what_decodes_have_not_to_spare
    ),
    "all_are_taken_for_best_effort": Plant(
        "whoever decodes beside best effort has its pace", _all_are_taken_for_best_effort
    ),
    "the_step_that_runs_counts_for_nothing": Plant(
        "what decodes have to spare is spent twice", _the_step_that_runs_counts_for_nothing
    ),
    "what_others_have_answered_counts_as_decoded_here": Plant(
        "whoever goes on with a long answer loses its TPOT", _what_others_have_answered_counts_as_decoded_here
    ),
    "running_prompts_are_not_limited": Plant(
        "a prompt that runs takes the tokens of decodes and of what has landed", _running_prompts_are_not_limited
    ),
    "limits_outlive_their_step": Plant("a prompt is never computed past its first chunk", _limits_outlive_their_step),
    "landed_requests_wait_in_line": Plant(
        "a request whose KV has come waits behind prompts", _landed_requests_wait_in_line
    ),
    "prompts_keep_their_blocks_before_what_has_landed": Plant(
        "a request that needs one token waits until prompts have ended",
        _prompts_keep_their_blocks_before_what_has_landed,
    ),
    "what_landed_in_part_counts_as_whole": Plant(
        "a request replays its token over slots that never came", _what_landed_in_part_counts_as_whole
    ),
    "a_held_token_is_sampled": PLANTS["answers_before_input_is_closed"],
    "plans_do_not_heed_the_decode_batch": Plant(
        "who the decode batch holds back runs beside it, unknown to it", _plans_do_not_heed_the_decode_batch
    ),
    "pulls_do_not_wait_for_copies_out": Plant(
        "a swapped session comes back with what another one has pulled into its blocks",
        _pulls_do_not_wait_for_copies_out,
        real=False,
    ),
    "leased_blocks_are_free_at_once": Plant(
        "another engine reads what others have written over", _leased_blocks_are_free_at_once
    ),
}
