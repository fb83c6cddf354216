"""vLLM's NIXL pull connector, with the hand-off rules of `kv_transfer.handoff.rules` enforced inside the engine.

Scheduler side: a request computes its prompt itself instead of pulling where its deadline has passed, and where its
tokens are not those that the blocks were computed from; pulls are recorded for the report; a lease can be ended early.
Worker side: a pull that ended after its deadline, or has not ended by then (`overdue_pulls`), counts as failed, so that
the engine recomputes it (`kv_load_failure_policy=recompute`).

Who owns the prompt's blocks on the prefill side:
    until the prefill ends             its request
    leased                             the scheduler's finished request, kept by the connector
    pulled, released or expired        nobody: back in the pool, still findable as cached prefix
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector

from cluster_core.clock import monotonic_s
from cluster_core.engine_jobs import HandoffReport, kv_scope
from cluster_wire.secret import read_secret
from kv_transfer import vllm_private
from kv_transfer.handoff import side_channel
from kv_transfer.handoff.block_checksums import BlockChecksums
from kv_transfer.handoff.content_check import (
    CHECKSUMS_PARAM,
    ContentChecks,
    ContentOrders,
    ContentReport,
    ContentSampling,
)
from kv_transfer.handoff.nixl_progress import progress_interval
from kv_transfer.handoff.overdue_pulls import OverduePulls, PullReport, Quarantine
from kv_transfer.handoff.rules import DEADLINE_PARAM, PullLedger, is_late
from kv_transfer.handoff.tokens_digest import TOKENS_DIGEST_PARAM, is_of, stamp
from kv_transfer.kv_layout import layout_of
from kv_transfer.model_features import Feature, allows
from kv_transfer.tiers.host_tiering import HostTiering

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput, KVConnectorTransferResults
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

PROGRESS_INTERVAL_US = "rachis_progress_interval_us"
SECRET_FILE = "rachis_secret_file"
VERIFY_SHARE = "rachis_verify_share"
_DEADLINES = "rachis_deadlines"
_CONTENT = "rachis_content_orders"


@dataclass(slots=True)
class WorkerReport(KVConnectorWorkerMetadata):
    """What a worker says beside the results of its transfers: of pulls that are overdue or over now, and of checks."""

    copies: KVConnectorWorkerMetadata | None
    pulls: PullReport
    content: ContentReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerReport":
        copies, pulls, content = self.copies, self.pulls, self.content
        others = other.copies if isinstance(other, WorkerReport) else other
        if copies is not None and others is not None:
            copies = copies.aggregate(others)
        if isinstance(other, WorkerReport):
            pulls += other.pulls
            content += other.content
        return WorkerReport(copies or others, pulls, content)


def _is_of_its_tokens(request: "Request", params: dict[str, Any]) -> bool:
    """Compared once: a request may wait for its turn over many steps."""
    if TOKENS_DIGEST_PARAM in params and params[TOKENS_DIGEST_PARAM] is None:
        return True
    pulled = request.all_token_ids[: request.num_prompt_tokens + _emitted_before_last(request)]
    if not is_of(params.get(TOKENS_DIGEST_PARAM), pulled, _scope_of(request)):
        return False
    params[TOKENS_DIGEST_PARAM] = None
    return True


def _emitted_before_last(request: "Request") -> int:
    """Tokens beyond the prompt that a lease is on as well: the last one emitted has no KV yet."""
    return max(0, request.num_output_tokens - 1)


def _scope_of(request: "Request") -> str:
    return kv_scope(request.cache_salt or "", request.lora_request.lora_name if request.lora_request else "")


class RachisNixlConnector(HostTiering, NixlPullConnector):
    """See the module. One instance lives in the scheduler, one in each worker process."""

    def __init__(self, vllm_config: "VllmConfig", role: "KVConnectorRole", kv_cache_config: "KVCacheConfig") -> None:
        secret_file = vllm_config.kv_transfer_config.get_from_extra_config(SECRET_FILE, None)
        if secret_file is not None:
            side_channel.secure(read_secret(Path(secret_file)).side_channel_key)
        interval_us = vllm_config.kv_transfer_config.get_from_extra_config(PROGRESS_INTERVAL_US, 0)
        with progress_interval(interval_us):
            super().__init__(vllm_config, role, kv_cache_config)
        self.pulls = PullLedger()
        # As NIXL's own telemetry counts them.
        self.kv_bytes_pulled = 0
        self.kv_descriptors_pulled = 0
        # (descriptors, bytes) that are of no pull that has ended yet.
        self._read = (0, 0)
        self.handoffs_pulled = 0
        self.handoffs_recomputed = 0
        self.handoffs_expired = 0
        self.handoffs_mismatched = 0
        # Scheduler side: what was handed over since the last step; workers pass over notices of what they do not know.
        self.has_untold_leases = False
        # Scheduler side: blocks that overdue pulls may still write into.
        self.quarantine: Quarantine | None = None
        share = vllm_config.kv_transfer_config.get_from_extra_config(VERIFY_SHARE, 0.0)
        layout = layout_of(vllm_config, kv_cache_config)
        self._checks_content = allows(layout, Feature.CONTENT_CHECK)
        self.content = ContentSampling(
            share if self._checks_content else 0.0, vllm_config.cache_config.block_size, vllm_private.workers_of(self)
        )
        # Worker side, once its memory is there.
        self._checks: ContentChecks | None = None
        self._pulled_blocks: dict[str, list[Any]] = {}
        self._overdue = OverduePulls(lambda transfers: vllm_private.take_ended_transfers(self, transfers))
        self._bytes_per_block = vllm_private.bytes_per_block(kv_cache_config)
        self._deadlines: dict[str, float] = {}

    # Scheduler side.

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        params = request.kv_transfer_params or {}
        if params.get("do_remote_prefill") and is_late(params[DEADLINE_PARAM], monotonic_s()):
            self._drop_pull(request, params)
            self.handoffs_expired += 1
        elif params.get("do_remote_prefill") and not _is_of_its_tokens(request, params):
            about = {"request_id": request.request_id}
            logger.error("the blocks were computed from other tokens, it computes its own", extra=about)
            self._drop_pull(request, params)
            self.handoffs_mismatched += 1
        if params.get("do_remote_prefill"):
            # vLLM pulls the prompt.
            num_computed_tokens -= _emitted_before_last(request)
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def _drop_pull(self, request: "Request", params: dict[str, Any]) -> None:
        params["do_remote_prefill"] = False
        vllm_private.stop_lease_renewal(self, request.request_id)
        self.pulls.drop(request.request_id)

    def request_finished(self, request: "Request", block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return self._stamped(request, *super().request_finished(request, block_ids))

    def request_finished_all_groups(self, request: "Request", block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return self._stamped(request, *super().request_finished_all_groups(request, block_ids))

    def _stamped(
        self, request: "Request", is_kept: bool, params: dict[str, Any] | None
    ) -> tuple[bool, dict[str, Any] | None]:
        """What a lease says, with what its blocks are of: all tokens but the last, which was just sampled."""
        if params is not None:
            tokens = request.num_tokens - 1
            params[TOKENS_DIGEST_PARAM] = stamp(request.all_token_ids[:tokens], _scope_of(request))
            params[CHECKSUMS_PARAM] = self.content.lease(request.request_id, params["remote_block_ids"][0], tokens)
        return is_kept, params

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        params = request.kv_transfer_params or {}
        if params.get("do_remote_prefill") and num_external_tokens > 0:
            pulled = sum(len(group) for group in blocks.get_unhashed_block_ids_all_groups())
            self.pulls.start(request.request_id, monotonic_s(), num_external_tokens, pulled * self._bytes_per_block)
            self._deadlines[request.request_id] = params[DEADLINE_PARAM]
            written = {block_id for group in blocks.get_unhashed_block_ids_all_groups() for block_id in group}
            self._pulled_blocks[request.request_id] = [
                block for group in blocks.blocks for block in group if block.block_id in written
            ]
            block_ids = [block.block_id for block in blocks.blocks[0]]
            self.content.pull(request.request_id, params.get(CHECKSUMS_PARAM), block_ids, written)
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> "KVConnectorMetadata":
        metadata = super().build_connector_meta(scheduler_output)
        self.has_untold_leases = False
        setattr(metadata, _DEADLINES, self._deadlines)
        self._deadlines = {}
        setattr(metadata, _CONTENT, self.content.take_orders())
        return metadata

    def use_pool(self, pool: Any) -> None:
        super().use_pool(pool)
        self.quarantine = Quarantine(pool)

    def has_pending_push_work(self) -> bool:
        """The engine goes on stepping for transfers that only it can see the end of."""
        return bool(self.quarantine) or super().has_pending_push_work()

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            assert self.quarantine is not None
            for request_id in report.pulls.given_up:
                vllm_private.stop_lease_renewal(self, request_id)
            self.quarantine.take_in(report.pulls, lambda request_id: self._pulled_blocks[request_id])
            self.content.take_in(report.content)
            connector_output.kv_connector_worker_meta = report.copies
        # Of the others, loads from host memory come to it.
        finished = set(connector_output.finished_recving or ())
        super().update_connector_output(connector_output)
        failed = finished & (connector_output.failed_recving or set())
        self.handoffs_pulled += len(finished - failed)
        self.handoffs_recomputed += len(failed)
        stats = connector_output.kv_connector_stats
        if stats is not None:
            kv_bytes = sum(stats.data.get("bytes_transferred", ()))
            descriptors = sum(stats.data.get("num_descriptors", ()))
            self.kv_bytes_pulled += kv_bytes
            self.kv_descriptors_pulled += descriptors
            self._read = self._read[0] + descriptors, self._read[1] + kv_bytes
        per_byte = self._read[0] / max(1, self._read[1])
        if finished:
            self._read = (0, 0)
        for request_id in finished:
            self.pulls.end(request_id, monotonic_s(), failed=request_id in failed, descriptors_per_byte=per_byte)
            self._pulled_blocks.pop(request_id, None)
            self.content.ended(request_id)

    def take_report(self, request_id: str) -> HandoffReport:
        """What came of the pull of a request that has begun to compute."""
        return self.pulls.take(request_id)

    def end_lease(self, request_id: str) -> None:
        """Frees the leased blocks of a finished prefill; the next steps of the engine carry it out."""
        vllm_private.expire_lease(self, request_id)
        self.content.forget(request_id)

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        if self._checks_content:
            views = vllm_private.block_views(self._swap_config, kv_caches)
            self._checks = ContentChecks(BlockChecksums(views).of, vllm_private.rank_of(self))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = vllm_private.bound_metadata(self)
        self._deadlines.update(getattr(metadata, _DEADLINES, {}))
        if self._checks is not None:
            self._checks.carry_out(getattr(metadata, _CONTENT, ContentOrders()))
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> "KVConnectorTransferResults":
        results = super().get_transfer_results(finished_req_ids)
        now_s = monotonic_s()
        for request_id in results.finished_recving:
            if is_late(self._deadlines.pop(request_id, now_s + 1), now_s):
                results.failed_recving.add(request_id)
            self._check_content(results, request_id)
        self._give_up_overdue(results, now_s)
        self._overdue.poll()
        return results

    def _check_content(self, results: "KVConnectorTransferResults", request_id: str) -> None:
        if self._checks is None:
            return
        if request_id in results.failed_recving:
            self._checks.forget(request_id)
        elif not self._checks.landed(request_id):
            about = {"request_id": request_id}
            logger.error("what was pulled is not what was sent, it computes its prompt", extra=about)
            results.failed_recving.add(request_id)

    def _give_up_overdue(self, results: "KVConnectorTransferResults", now_s: float) -> None:
        for request_id in [name for name, deadline_s in self._deadlines.items() if is_late(deadline_s, now_s)]:
            del self._deadlines[request_id]
            handles = vllm_private.give_up_pull(self, request_id)
            if self._checks is not None:
                self._checks.forget(request_id)
            if handles is not None:
                logger.warning("its pull is overdue, it computes its prompt", extra={"request_id": request_id})
                self._overdue.give_up(request_id, handles)
                results.finished_recving.add(request_id)
                results.failed_recving.add(request_id)

    def build_connector_worker_meta(self) -> "KVConnectorWorkerMetadata | None":
        copies, pulls = super().build_connector_worker_meta(), self._overdue.report()
        content = self._checks.report() if self._checks is not None else ContentReport()
        return WorkerReport(copies, pulls, content) if pulls or content else copies
