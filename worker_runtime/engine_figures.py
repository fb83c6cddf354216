"""What one engine says of itself: its counters, its measured costs, and the status that is a snapshot of all of it.

Written on the engine's thread; `status` is replaced as a whole and may be read anywhere.
"""

from collections.abc import Sequence
from typing import Any

from cluster_core.engine_reports import (
    EngineCounters,
    EngineInfo,
    EngineLoad,
    EngineStatus,
    HotPrefix,
    TierReport,
)
from kv_transfer import vllm_private
from kv_transfer.tiers import report as tier_report
from worker_runtime.engine_settings import EngineRole, EngineSettings
from worker_runtime.step_costs import StepCosts


class EngineFigures:
    """`counters` and `costs` are written by `RunningJobs`, too."""

    def __init__(self, engine: Any, info: EngineInfo, settings: EngineSettings) -> None:
        self._engine = engine
        self._settings = settings
        self.block_size = info.block_size_tokens
        self.missing_features = info.missing_features
        self._block_bytes = vllm_private.block_bytes(engine)
        self.counters = EngineCounters()
        self.costs = StepCosts()
        vllm_private.tell_costs(engine, self.costs.costs)
        self.status = EngineStatus()

    def count_step(self, seconds: float) -> None:
        """What the step that has just run computed, and how long it took."""
        stepped = getattr(vllm_private.scheduler_of(self._engine), "stepped", None)
        if stepped is None:
            return
        scheduled, going_on = stepped.num_scheduled_tokens, stepped.scheduled_cached_reqs
        prefilled: list[tuple[int, int]] = []
        context_tokens = sum(going_on.num_computed_tokens)
        if stepped.total_num_scheduled_tokens > len(scheduled):
            before = dict(zip(going_on.req_ids, going_on.num_computed_tokens, strict=True))
            before |= {new.req_id: new.num_computed_tokens for new in stepped.scheduled_new_reqs}
            prefilled = [(before[name], tokens) for name, tokens in scheduled.items() if tokens > 1]
            context_tokens = sum(before[name] for name, tokens in scheduled.items() if tokens == 1)
        self.costs.stepped(seconds, prefilled, len(scheduled) - len(prefilled), context_tokens)

    def publish(self, leased_handoffs: int, stored_blocks: int) -> None:
        """Makes `status` what the engine is now."""
        running, waiting = vllm_private.queue_lengths(self._engine)
        free, total = vllm_private.block_counts(self._engine)
        sessions, free_host, total_host = vllm_private.session_counts(self._engine)
        load = EngineLoad(
            running,
            waiting,
            leased_handoffs,
            free,
            total,
            sessions,
            free_host,
            total_host,
            quarantined_blocks=vllm_private.quarantined_blocks(self._engine),
        )
        self.counters.stored_blocks = stored_blocks
        if self._settings.role is not EngineRole.ALONE:
            self._count_handoffs()
        tiers = self._tier_report(total)
        decode = vllm_private.decode_report_of(self._engine)
        self.status = EngineStatus(load, self.counters, tiers, decode, self.costs.costs())

    def hottest_prefixes(self, at_most: int) -> Sequence[HotPrefix]:
        tiers = vllm_private.tiers_of(self._engine)
        return tier_report.hottest_prefixes(tiers, self.block_size, at_most) if tiers is not None else ()

    def _count_handoffs(self) -> None:
        connector = vllm_private.connector_of(self._engine)
        self.counters.kv_bytes_pulled = connector.kv_bytes_pulled
        self.counters.kv_descriptors_pulled = connector.kv_descriptors_pulled
        self.counters.handoffs_expired = connector.handoffs_expired
        self.counters.handoffs_mismatched = connector.handoffs_mismatched + connector.content.unlike
        self.counters.handoffs_verified = connector.content.verified
        self.counters.handoffs_pulled = connector.handoffs_pulled
        self.counters.handoffs_recomputed = connector.handoffs_recomputed

    def _tier_report(self, capacity_blocks: int) -> TierReport | None:
        tiers = vllm_private.tiers_of(self._engine)
        if tiers is None:
            return None
        counters, ranks = tiers.counters, self._settings.engine.tensor_parallel_size
        self.costs.loaded((counters.copy_out_s + counters.copy_back_s) / ranks, counters.timed * self.block_size)
        return tier_report.tier_report(tiers, self._block_bytes, capacity_blocks)
