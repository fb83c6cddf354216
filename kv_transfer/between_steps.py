"""Looks for what has been pulled or loaded before each step of an engine, so that it computes in that step.

vLLM asks its connector when a step has been launched, and hears the answer when that step has ended: what lands during
a step is found by the next one, and computes in the one after that, a step after it could. What an engine has launched
is not touched, and nothing waits: as it does, only sooner. Where an engine's workers are processes of their own, vLLM's
way is left as it is.
"""

from collections.abc import Callable
from typing import Any

# While blocks are on their way or leased, and there is nothing to compute, it is looked at so often whether they have
# landed or were released.
NAP_S = 0.001

# What an engine's step returns: outputs by client, and whether anything was computed.
Step = Callable[[], tuple[dict[int, Any] | None, bool]]


def look_before_steps(engine: Any) -> None:
    """From now on `engine`, an in-process `LLMEngine`, does; once, before its first step."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if engine.vllm_config.parallel_config.world_size == 1 and has_kv_transfer_group():
        core = engine.engine_core.engine_core
        core.step_fn = LookingStep(core.scheduler, get_kv_transfer_group(), core.step_fn)


class LookingStep:
    """connector: its worker's side. step: the engine's own."""

    def __init__(self, scheduler: Any, connector: Any, step: Step) -> None:
        self._scheduler = scheduler
        self._connector = connector
        self._step = step

    def __call__(self) -> tuple[dict[int, Any] | None, bool]:
        if self._awaits_kv():
            found = self._look()
            if any(each.outputs for each in found.values()):
                # Who has failed by it is told before anybody computes.
                return found, False
        return self._step()

    def _awaits_kv(self) -> bool:
        """Whether a request waits for KV that has not landed as far as the scheduler knows, and may be asked for."""
        from vllm.v1.request import RequestStatus

        if getattr(self._scheduler.connector, "has_untold_leases", False):
            # Notices of them would be lost.
            return False
        landed = self._scheduler.finished_recving_kv_req_ids
        return any(
            each.status is RequestStatus.WAITING_FOR_REMOTE_KVS and each.request_id not in landed
            for each in self._scheduler.kv_holding_waiting
        )

    def _look(self) -> dict[int, Any]:
        """As a step without work that brings back what the worker has to say."""
        from vllm.v1.core.sched.output import SchedulerOutput
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        connector = self._connector
        results = connector.get_transfer_results(set())
        transfers = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=connector.get_block_ids_with_load_errors(),
            kv_connector_stats=connector.get_kv_connector_stats(),
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
        )
        if transfers.is_empty():
            return {}
        told = ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=transfers)
        outputs: dict[int, Any] = self._scheduler.update_from_output(SchedulerOutput.make_empty(), told)
        return outputs
