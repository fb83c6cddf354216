"""The schedulers of engines that do both: sessions, prompts for other workers, pulled requests and whole ones in one.

The mixins of both pools, and here what each has to know of the other. Every step is decided in this order:
    ChunkBounding     how many tokens there are: one for each decode and each landed request, the rest for prompts
    BatchScheduling   which of those that will decode here may begin; sessions, and prompts that are handed off, join no
                      decode batch, and are not asked
    StreamingMixin    while a session is open, or tenants take turns: who of all these is computed, and who loses blocks
                      for it
    vLLM              carries it out

Who knows a request:
    session                    StreamingMixin, from `open_session` to its last token; never the decode batch
    prompt that is handed off  the lease, once it has its first token; never the decode batch
    pulled, or whole           the decode batch, from `add_request` to its end
"""

from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from cluster_core.clock import monotonic_s
from decode_worker.adapter_places import AdapterPlaces
from decode_worker.batch_scheduling import BatchScheduling
from decode_worker.chunk_bounding import ChunkBounding
from decode_worker.gated_queue import GatedQueue
from decode_worker.pulled import pulls
from kv_transfer.tiers.tiered_scheduling import TieredScheduling
from prefill_worker.engine_scheduler import StreamingMixin
from prefill_worker.planning import StepPlan
from prefill_worker.policies import Contender, Tenure


class SharedMixin(ChunkBounding, BatchScheduling, StreamingMixin):
    """See the module."""

    # For `BatchScheduling`.

    def _joins_batch(self, request: Request) -> bool:
        is_handed_off = (request.kv_transfer_params or {}).get("do_remote_decode")
        return not is_handed_off and request.request_id not in self._sessions

    def _preempt_waiting(self, request: Any) -> None:
        super()._preempt_waiting(request)
        if self.batching is not None and request.request_id in self.batching:
            self.batching.preempted(request.request_id, monotonic_s())

    # For `ChunkBounding`.

    def _due_at_s(self, request: Any) -> float:
        """Of a session from when its prompt was complete."""
        if request.input_open or request.num_output_tokens:
            return inf
        return float(request.last_chunk_s + self._objectives_of(request).ttft_s)

    def _left_tokens(self, request: Any) -> int:
        """But for what lies in host memory of a session that was swapped."""
        return min(super()._left_tokens(request), int(request.num_tokens) - self._ready_tokens(request))

    def _shares_out(self) -> bool:
        return not self._plans_steps

    # For `StreamingMixin`.

    def _one_token_each(self) -> int:
        landed = sum(self._needs_one_token(each) for each in (*self.kv_holding_waiting, *self.waiting))
        return super()._one_token_each() + landed

    def _has_to_wait(self, request: Any, *, holds_blocks: bool) -> bool:
        return self._is_held_back(request) or super()._has_to_wait(request, holds_blocks=holds_blocks)

    def _contender(self, request: Any, tenure: Tenure, index: int, now_s: float) -> Contender:
        contender = super()._contender(request, tenure, index, now_s)
        contender.decodes = bool(request.num_output_tokens)
        if self._waits_to_pull(request):
            # It takes blocks for all of its prompt, and computes none of it.
            contender.remaining_tokens = min(contender.remaining_tokens, 1)
        return contender

    def _look_up(self, contender: Contender) -> None:
        remaining = contender.remaining_tokens
        super()._look_up(contender)
        if self._waits_to_pull(self.requests[contender.request_id]):
            contender.remaining_tokens = remaining

    def _has_turns(self) -> bool:
        waiting = (*self.kv_holding_waiting, *self.waiting)
        return super()._has_turns() or any(self._needs_one_token(request) for request in waiting)

    def _turn(self, contender: Contender) -> int:
        """What has landed goes with those that have begun to answer, what will be pulled between them and prompts."""
        request = self.requests[contender.request_id]
        if self._needs_one_token(request):
            if not self._waits_to_pull(request):
                return 0
            if request.request_id not in self._refused:
                return 1
        return 2 * super()._turn(contender)

    @contextmanager
    def _only(self, plan: StepPlan) -> Iterator[None]:
        """The gate has been heeded by the plan, which has an order of its own."""
        gate = self.waiting if isinstance(self.waiting, GatedQueue) else None
        if gate is not None:
            gate.open()
        with super()._only(plan):
            yield

    # Its own.

    def _is_held_back(self, request: Any) -> bool:
        """The decode batch does not want it yet."""
        return isinstance(self.waiting, GatedQueue) and self.waiting.hides(request)

    def _waits_to_pull(self, request: Any) -> bool:
        return not request.num_computed_tokens and not request.num_preemptions and pulls(request)

    def _needs_one_token(self, request: Any) -> bool:
        """It does not run, and will not compute more of a prompt: its KV has come, or will be pulled."""
        if request.status not in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
            return False
        has_come = 0 < request.num_tokens - 1 <= request.num_computed_tokens
        return self._waits_to_pull(request) or (has_come and not request.input_open)


class SharedScheduler(SharedMixin, TieredScheduling, AdapterPlaces, Scheduler):
    """For engines that run one step at a time."""


class AsyncSharedScheduler(SharedMixin, TieredScheduling, AdapterPlaces, AsyncScheduler):
    """For engines that schedule a step while the one before runs."""
