"""Gives a vLLM scheduler the order of admission of `decode_worker.batching`.

A mixin over `Scheduler` and `AsyncScheduler`, before others in the bases. Each step: the core plans who joins, vLLM's
own `schedule` sees those alone behind a gate and admits them or not, and the core settles what came of it. A waiting
request holds nothing. With the policy `fcfs`, and for a model whose KV is not one list of blocks for each
request, nothing is changed at all.

A request is known to `requests` and the queues of vLLM, and to the core as waiting or in the batch (running, loading).
Where an engine has requests that join no decode batch (`_joins_batch`), the core does not know those: they are shown
with every plan, each in its place among those of the core.
"""

import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from cluster_core.clock import monotonic_s
from cluster_core.engine_reports import DecodeBatch, DecodeReport
from cluster_core.errors import UnavailableError
from decode_worker import batch_report, chunk_hashes
from decode_worker.batch_members import Plan
from decode_worker.batch_settings import KEY, BatchSettings
from decode_worker.batching import Batching
from decode_worker.gated_queue import GatedQueue
from decode_worker.policy_store import PolicyFile
from decode_worker.pulled import pulls
from decode_worker.rewards import FormedBatch, RewardLedger
from decode_worker.stop_policies import POLICIES, PolicySettings
from decode_worker.throughput_guard import GuardSettings, Mode, ThroughputGuard
from kv_transfer import vllm_private
from kv_transfer.handoff.rules import DEADLINE_PARAM
from kv_transfer.kv_layout import layout_of
from kv_transfer.model_features import Feature, allows
from kv_transfer.request_tenant import tenant_of
from worker_runtime.vllm_conversion import REQUEST_DEADLINE_ARG

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler as _Scheduler
else:
    _Scheduler = object

_IN_BATCH = (RequestStatus.RUNNING, RequestStatus.WAITING_FOR_REMOTE_KVS)
_NOBODY = Plan(0)

log = logging.getLogger(__name__)


class BatchScheduling(_Scheduler):
    """See the module."""

    waiting: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # None where vLLM's own order is kept.
        self.batching: Batching | None = None
        self.batch_counters = batch_report.StepCounters()
        given: Mapping[str, Any] | None = self.vllm_config.additional_config.get(KEY)
        self.use_policy(BatchSettings.of(given) if given is not None else BatchSettings(policy="fcfs"))

    def use_policy(self, settings: BatchSettings) -> None:
        """Starts anew with these settings. Raises RuntimeError while there are requests."""
        if self.requests:
            raise RuntimeError("the policy of a scheduler that has requests cannot be changed")
        self.batch_settings = settings
        self._chunk_blocks = -(-settings.chunk_tokens // self.block_size)
        self.chunk_tokens = self._chunk_blocks * self.block_size
        self.batch_mode = Mode.POLICY.value
        self._steps: dict[int, tuple[float, FormedBatch | None, bool]] = {}
        # For policies that learn.
        self._rewards: RewardLedger | None = None
        self._last_output_s = 0.0
        # At most so many are planned: few after a step in which vLLM had no room for all.
        self._most_joining = self.max_num_active_reqs
        self._passed_over = 0
        self.guard = ThroughputGuard(
            GuardSettings(settings.guard, settings.probe_interval_s, settings.probe_s, settings.fallback_s)
        )
        self._policy_file: PolicyFile | None = None
        self._saved_s = monotonic_s()
        self.batch_counters = batch_report.StepCounters()
        self.batching = None
        if settings.policy == "fcfs":
            return
        if not allows(layout_of(self.vllm_config, self.kv_cache_config), Feature.DECODE_BATCHES):
            # In order of arrival.
            return
        policy = POLICIES[settings.policy](PolicySettings(), Random(self.vllm_config.model_config.seed))
        self.batching = Batching(
            policy,
            settings.wait_bound_s,
            lambda chunk: vllm_private.is_cached(self, chunk),
            slack_tokens=settings.slack_tokens,
        )
        self._rewards = RewardLedger(policy) if policy.dump() is not None else None
        if settings.policy_folder is not None and policy.dump() is not None:
            self._policy_file = PolicyFile(Path(settings.policy_folder), policy.name, self._made_for())
            restored = self._policy_file.restore(policy)
            if restored.problem:
                log.warning("the policy starts with an empty table: %s", restored.problem)
        self.waiting = GatedQueue(self.waiting)

    # vLLM's scheduler interface.

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        if self.batching is not None and request.request_id not in self.batching and self._joins_batch(request):
            began_s = monotonic_s()
            self.batching.insert(
                request.request_id,
                self._hashes(request),
                began_s,
                request.priority,
                _deadline_s(request),
                pulls=pulls(request),
                tokens=request.num_prompt_tokens,
                tenant=tenant_of(request),
            )
            self.batch_counters.planned(monotonic_s() - began_s)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        batching = self.batching
        if batching is None:
            return super().schedule(throttle_prefills)
        began_s = monotonic_s()
        self._note_loads(batching, began_s)
        # A request that holds blocks and does not run is of the batch: it loads, or has loaded.
        holding = sum(each.request_id in batching for each in self.kv_holding_waiting)
        places = self.max_num_active_reqs - len(self.running) - holding
        mode = self.guard.mode(began_s)
        self.batch_mode = mode.value
        by_arrival = mode is not Mode.POLICY
        plan = self._plan_batch(batching, places, began_s, by_arrival=by_arrival) if places > 0 else _NOBODY
        self.waiting.close(self._shown(batching, plan))
        planned_s = monotonic_s()
        try:
            output = super().schedule(throttle_prefills)
        finally:
            self.waiting.open()
        scheduled_s = monotonic_s()
        admitted = self._settle_batch(batching, plan, places, scheduled_s) if places > 0 else []
        batch = self._rewards.formed(plan.decisions(admitted), by_arrival=by_arrival) if self._rewards else None
        self._steps[id(output)] = (began_s, batch, batching.waiting_requests > 0)
        self.batch_counters.planned(monotonic_s() - scheduled_s + planned_s - began_s)
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, Any]:
        outputs: dict[int, Any] = super().update_from_output(scheduler_output, model_runner_output)
        step = self._steps.pop(id(scheduler_output), None)
        size = len(scheduler_output.num_scheduled_tokens)
        if self.batching is None and size:
            self.batch_counters.executed(size, 0)
        elif self.batching is not None and step is not None:
            began_s, batch, contended = step
            now_s = monotonic_s()
            step_s = now_s - max(began_s, self._last_output_s)
            self._last_output_s = now_s
            decodes = 0 < size == scheduler_output.total_num_scheduled_tokens and not scheduler_output.has_sync_kv_loads
            if self._rewards is not None and batch is not None:
                self._rewards.executed(batch, size / step_s if decodes and step_s > 0 else None, step_s)
            if size:
                tip_tokens = self.batching.tree.tip_chunks * self.chunk_tokens
                self.batch_counters.executed(size, tip_tokens)
            if decodes:
                self.guard.executed(now_s, size, step_s, contended)
            self._save_policy(now_s)
            self.batch_counters.planned(monotonic_s() - now_s)
        return outputs

    def _preempt_request(self, request: Request, timestamp: float, drop_stale_output: bool = False) -> None:
        super()._preempt_request(request, timestamp, drop_stale_output)
        if self.batching is not None and request.request_id in self.batching:
            self.batching.preempted(request.request_id, monotonic_s())

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        if self.batching is not None:
            self.batching.gone(request.request_id)
        return super()._free_request(request, delay_free_blocks)

    def shutdown(self) -> None:
        self._save_policy()
        super().shutdown()

    # What people see.

    def decode_report(self) -> DecodeReport:
        return batch_report.decode_report(self)

    def decode_batch(self, at_most: int) -> DecodeBatch:
        return batch_report.decode_batch(self, at_most, monotonic_s())

    # Its own.

    def _joins_batch(self, request: Request) -> bool:
        """Whether it will decode here among the others, so that the core says when it begins."""
        return True

    def _shown(self, batching: Batching, plan: Plan) -> list[str]:
        """Whom vLLM may admit, in this order: pulls, which take nothing of a step, before what is computed; others that
        the core does not know keep their places in the queue."""
        planned = sorted(plan.joining, key=lambda each: not each.member.pulls)
        if len(self.waiting) == batching.waiting_requests:
            return [each.member.request_id for each in planned]
        pulled = [each.member.request_id for each in planned if each.member.pulls]
        computed = iter([each.member.request_id for each in planned if not each.member.pulls])
        in_place = (next(computed, None) if each.request_id in batching else each.request_id for each in self.waiting)
        return [*pulled, *(name for name in in_place if name is not None), *computed]

    def _plan_batch(self, batching: Batching, places: int, now_s: float, *, by_arrival: bool) -> Plan:
        most = min(places, self._most_joining) + self._passed_over
        return batching.plan(now_s, most, by_arrival=by_arrival)

    def _settle_batch(self, batching: Batching, plan: Plan, places: int, now_s: float) -> list[str]:
        """Settles a plan with the core; returns which of its requests vLLM has admitted."""
        status = {name: self.requests[name].status for name in plan.request_ids}
        admitted = [name for name, each in status.items() if each in _IN_BATCH]
        pulling = [name for name in admitted if status[name] is RequestStatus.WAITING_FOR_REMOTE_KVS]
        batching.settle(plan, admitted, pulling, now_s)
        # vLLM passes over requests that cannot begin yet: others are planned besides. One without memory ends the step.
        self._passed_over = sum(self.requests[name] in self.deferred_waiting for name in status if name not in admitted)
        refused = len(admitted) < min(places, len(plan.joining) - self._passed_over)
        most = self.max_num_active_reqs
        self._most_joining = max(1, 2 * len(admitted)) if refused else min(most, 2 * self._most_joining)
        return admitted

    def _note_loads(self, batching: Batching, now_s: float) -> None:
        for name in batching.loading():
            if self.requests[name].status is not RequestStatus.WAITING_FOR_REMOTE_KVS:
                batching.loaded(name)
        if len(self.waiting) != batching.waiting_requests:
            # A pull failed before anything of it was of use: vLLM has put the request back.
            for request in self.waiting:
                if request.request_id in batching and not batching.waits(request.request_id):
                    vllm_private.drop_reservation(self, request)
                    batching.preempted(request.request_id, now_s)

    def _hashes(self, request: Request) -> list[Any]:
        prompt_chunks = request.num_prompt_tokens // self.chunk_tokens
        if request.block_hashes:
            return chunk_hashes.of_blocks(request.block_hashes, self._chunk_blocks)[:prompt_chunks]
        return chunk_hashes.of_tokens(request.prompt_token_ids or (), self.chunk_tokens)

    def _made_for(self) -> dict[str, str]:
        """What learned values depend on."""
        from vllm.platforms import current_platform

        config = self.vllm_config
        return {
            "model": str(config.model_config.model),
            "dtype": str(config.model_config.dtype),
            "device": f"{current_platform.device_type} {current_platform.get_device_name()}",
            "host": f"{_processor()}, {os.cpu_count()} cores, {os.environ.get('OMP_NUM_THREADS', 'all')} threads",
            "tensor_parallel_size": str(config.parallel_config.tensor_parallel_size),
            "block_size_tokens": str(self.block_size),
            "chunk_tokens": str(self.chunk_tokens),
            "max_running_requests": str(self.max_num_running_reqs),
            "order_rows": str(self.batch_settings.order_rows),
        }

    def _save_policy(self, now_s: float | None = None) -> None:
        """now_s: None saves in any case."""
        if self._policy_file is None or self.batching is None:
            return
        if now_s is not None and now_s - self._saved_s < self.batch_settings.save_interval_s:
            return
        self._saved_s = monotonic_s()
        try:
            self._policy_file.save(self.batching.policy.dump())
        except UnavailableError as error:
            log.warning("%s", error)


def _processor() -> str:
    """As the kernel names it; empty where it does not."""
    with suppress(OSError), Path("/proc/cpuinfo").open() as lines:
        return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return ""


def _deadline_s(request: Request) -> float | None:
    """From when the answer is of no use, or the prompt's KV can be pulled no longer, on the monotonic clock."""
    arguments = (request.sampling_params.extra_args or {}) if request.sampling_params is not None else {}
    deadlines = [arguments[REQUEST_DEADLINE_ARG]] if REQUEST_DEADLINE_ARG in arguments else []
    params = request.kv_transfer_params or {}
    if params.get("do_remote_prefill") and DEADLINE_PARAM in params:
        deadlines.append(params[DEADLINE_PARAM])
    return min(deadlines, default=None)
