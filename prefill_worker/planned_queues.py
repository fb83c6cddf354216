"""The part of the streaming scheduler that keeps vLLM's own `schedule` to a plan.

While a step is scheduled vLLM's queues hold the planned requests alone, in priority order, and each is kept to its
grant. Behind it the others are put back where they were.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.request_queue import RequestQueue

from prefill_worker.planning import StepPlan, reached_tokens

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler as _Scheduler
else:
    _Scheduler = object


class PlannedQueues(_Scheduler):
    """Mixin over `Scheduler` and `AsyncScheduler`."""

    running: list[Any]
    num_waiting_for_streaming_input: int
    scheduler_reserve_full_isl: bool

    @contextmanager
    def _only(self, plan: StepPlan) -> Iterator[None]:
        """While the block runs, vLLM's queues hold the planned requests alone, in priority order."""
        planned = {grant.contender.request_id: grant for grant in plan.grants}
        rank = {request_id: index for index, request_id in enumerate(planned)}
        hidden = [request for request in self.running if request.request_id not in planned]
        self.running = [request for request in self.running if request.request_id in planned]
        self.running.sort(key=lambda request: rank[request.request_id])
        queues = (self.kv_holding_waiting, self.waiting)
        order = [list(queue) for queue in queues]
        for queue in queues:
            chosen = [request for request in queue if request.request_id in planned]
            _refill(queue, sorted(chosen, key=lambda request: rank[request.request_id]))
        limited = self._limit(plan)
        # What vLLM counts as paused sessions are places taken in the model runner: here only the hidden ones take any.
        paused, self.num_waiting_for_streaming_input = self.num_waiting_for_streaming_input, len(hidden)
        reserve, self.scheduler_reserve_full_isl = self.scheduler_reserve_full_isl, False
        try:
            yield
        finally:
            self.scheduler_reserve_full_isl = reserve
            self.num_waiting_for_streaming_input = paused
            for request in limited:
                request.step_limit = None
            self.running.extend(hidden)
            for queue, before in zip(queues, order, strict=True):
                self._restore(queue, before, planned.keys())

    def _limit(self, plan: StepPlan) -> list[Any]:
        """Keeps a request to its grant: there is room for no more. A prompt that is whole and holds nothing may be on
        its way from another engine, at its full length; it is limited by what the others leave."""
        limited = []
        for grant in plan.grants:
            request = self.requests[grant.contender.request_id]
            if grant.tokens >= grant.contender.remaining_tokens:
                continue
            request.make_hashes()
            if request.num_computed_tokens:
                request.step_limit = request.num_computed_tokens + grant.tokens
            elif request.input_open:
                request.step_limit = reached_tokens(grant)
            else:
                continue
            limited.append(request)
        return limited

    def _restore(self, queue: RequestQueue, before: list[Any], planned: Any) -> None:
        """What was left out is back in its place; what vLLM preempted meanwhile stays in front."""
        left = list(queue)
        known, waiting = set(before), set(left)
        kept = [each for each in before if each in waiting or each.request_id not in planned]
        _refill(queue, [*(each for each in left if each not in known), *kept])


def _refill(queue: RequestQueue, requests: Sequence[Any]) -> None:
    queue.remove_requests(list(queue))
    for request in requests:
        queue.add_request(request)
