"""The streaming scheduler: vLLM's own, with sessions whose prompt arrives while it is prefilled.

A mixin over `Scheduler` and `AsyncScheduler`. While no session is open, and all requests are of one tenant and one
priority, it changes nothing: vLLM's `schedule` runs as it is. Otherwise each step has two phases
(`prefill_worker.two_phase`), tenants and priorities take turns (`prefill_worker.turn_taking`), and between steps
sessions take in their input (`prefill_worker.session_input`).

Nothing of a session is sampled before its input is closed: its last known token is held back, so that the model runner
never reaches the end of what it knows.

Who holds the KV of a session:
    waiting, never scheduled           nobody; published blocks of its prefix lie in the cache
    running                            its request
    parked: all input so far computed  its request; may be preempted by anybody
    preempted by swap                  host memory (`host_memory.swap_ledger`), and the cache as far as it lasts
    preempted by recompute             nobody; the cache as far as it lasts
    finished, leased                   the connector, as every prefill
"""

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from cluster_core.clock import monotonic_s
from kv_transfer.handoff.emitted_output import EmittedOutput
from kv_transfer.tiers.tiered_scheduling import TieredScheduling
from prefill_worker.leased_blocks import LeasedBlocks
from prefill_worker.partial_budget import WholePrompts
from prefill_worker.policies import BOUND_PARTIAL, make_policy
from prefill_worker.scheduler_settings import SchedulerSettings
from prefill_worker.streaming_request import StreamingRequest
from prefill_worker.survival import SurvivalEstimates
from prefill_worker.two_phase import TwoPhase


class StreamingMixin(TwoPhase):
    """Goes before `Scheduler` or `AsyncScheduler` in the bases. See the module."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = SchedulerSettings.of(self.vllm_config)
        self.preemption_strategy = settings.preemption
        self.cost_model = settings.cost_model
        self.expected_load_s = self._swap_in_s
        self._order = make_policy(settings.policy, settings.starvation_s)
        self._bounds_partial = settings.policy in BOUND_PARTIAL
        self._survival = SurvivalEstimates()
        self._whole_prompts = WholePrompts()
        self.held_nap_s = 0.0
        self._starvation_s = settings.starvation_s
        self._sessions = {}
        self._ended = {}
        self._late_input = {}
        self._leased = LeasedBlocks()
        self._shared_hits = {}
        self._refused = set()
        self._lost_idle = set()
        self._loading = set()
        self._idle_room_blocks = 0
        self.swaps = getattr(self.connector, "swaps", None)

    # vLLM's scheduler interface.

    def add_request(self, request: Request) -> None:
        request.__class__ = StreamingRequest
        request.arrived_s = request.last_chunk_s = monotonic_s()
        request.waiting_since_s = request.arrived_s
        if request.request_id in self._sessions:
            request.input_open = True
            self._hold_back(request)
            if not request.num_tokens:
                self._set_parked(request)
        else:
            self._whole_prompts.came(request.arrived_s)
        super().add_request(request)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        now_s = monotonic_s()
        if self._plans_steps:
            with self._in_short_steps():
                output = self._schedule_in_two_phases(lambda: super(StreamingMixin, self).schedule(throttle_prefills))
        else:
            self.held_nap_s = 0.0
            output = super().schedule(throttle_prefills)
            self._note_unplanned(output.num_scheduled_tokens)
        self._speed.began(output, output.total_num_scheduled_tokens, now_s)
        return output

    def _swap_in_s(self, tokens: int) -> float:
        return self.cost_model.swap_in.ms(tokens) / 1000

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        held = []
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self.requests[request_id]
            request.step_limit = None
            if request.held_tokens:
                held.append(request)
        # While its input is open a request never ends its prefill: vLLM would expect a token of it.
        for request in held:
            request.held_tokens = 0
        super()._update_after_schedule(scheduler_output)
        for request in held:
            request.held_tokens = 1

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, Any]:
        self._speed.ended(scheduler_output, monotonic_s())
        if scheduler_output.total_num_scheduled_tokens:
            # What was planned beside that step knew nothing of what it brings.
            self.held_nap_s = 0.0
        self._mix.look(monotonic_s())
        outputs: dict[int, Any] = super().update_from_output(scheduler_output, model_runner_output)
        if self._sessions:
            now_s = monotonic_s()
            for request_id in self.load_failed:
                if request_id in self._sessions:
                    self._sessions[request_id].ready(self._ready_tokens(self.requests[request_id]))
            for request_id in scheduler_output.num_scheduled_tokens:
                if request_id in self._sessions:
                    self._settle(request_id, now_s)
            self._revive_lost()
        return outputs

    def finish_requests(self, request_ids: Any, finished_status: RequestStatus) -> list[Request]:
        finished: list[Request] = super().finish_requests(request_ids, finished_status)
        for request in finished:
            self._sessions.pop(request.request_id, None)
            self._late_input.pop(request.request_id, None)
            self._lost_idle.discard(request.request_id)
            self._survival.forget(request.request_id)
        self._revive_lost()
        return finished


class StreamingScheduler(StreamingMixin, TieredScheduling, EmittedOutput, Scheduler):
    """For engines that run one step at a time."""


class AsyncStreamingScheduler(StreamingMixin, TieredScheduling, EmittedOutput, AsyncScheduler):
    """For engines that schedule a step while the one before runs."""
