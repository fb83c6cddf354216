"""Ends what no step would: who has an adapter's place lacks the blocks of who waits for one.

A step has so many LoRA adapters at most, those of all that run. Who waits for a place among them contends for no step,
and keeps the blocks that it holds. Where nobody at all can be planned
    who computes a prompt, or takes input, leaves the model runner with its blocks: both contend again
    beside those that decode, which have to stay, the last that waits gives its blocks up
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.config import LoRAConfig
from vllm.v1.request import RequestStatus

from kv_transfer import vllm_private
from prefill_worker.planning import StepPlan

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler as _Scheduler
else:
    _Scheduler = object

_QUEUED = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


class AdapterStandstill(_Scheduler):
    """Mixin over `Scheduler` and `AsyncScheduler`."""

    lora_config: LoRAConfig | None
    # Of the scheduler that it is mixed into.
    _set_aside: Callable[[Any, float], bool]
    _is_evictable: Callable[[Any], bool]
    _preempt_left_out: Callable[[Any, float], None]

    def _end_standstill(self, plan: StepPlan, now_s: float) -> None:
        """Before a step. One that computes anything changes nothing."""
        if self.lora_config is None or plan.grants or not any(each.remaining_tokens for each in plan.left_out):
            return
        waiting = self._waiting_for_a_place(plan)
        if not waiting:
            return
        holders = [self.requests[each.request_id] for each in plan.left_out if each.adapter]
        if sum(self._set_aside(each, now_s) for each in holders):
            return
        for request in reversed(waiting):
            if vllm_private.request_blocks(self, request.request_id) and self._is_evictable(request):
                self._preempt_left_out(request, now_s)
                return

    def _waiting_for_a_place(self, plan: StepPlan) -> list[Any]:
        """Who holds blocks first, as vLLM serves them."""
        contending = {each.request_id for each in plan.left_out}
        taken = {vllm_private.adapter_of(each) for each in self.running} | {0}
        return [
            each
            for queue in (self.kv_holding_waiting, self.waiting)
            for each in queue
            if each.status in _QUEUED
            and each.request_id not in contending
            and vllm_private.adapter_of(each) not in taken
        ]
