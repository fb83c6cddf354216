"""Gives a vLLM scheduler the order of eviction of `prefix_tiers`, and counts which blocks its requests ask for.

A mixin over `Scheduler` and `AsyncScheduler`, after others in the bases. A request counts once for each block: for its
prompt with the first step after it was added, or, where that step computes it, with the next one, so that no first
token waits for the counting; for what was generated when it ends; a prompt that may still change, when it ends. Whether
it is the next turn of a conversation is looked up as it is added, of one that may not change. A model whose KV is not
one list of blocks for each request keeps vLLM's own order.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from cluster_core.clock import monotonic_s
from kv_transfer import vllm_private
from kv_transfer.claims.block_events import emit_where_blocks_lie
from kv_transfer.kv_layout import layout_of
from kv_transfer.model_features import Feature, allows
from kv_transfer.request_tenant import tenant_of
from kv_transfer.tiers.async_loads import AsyncLoads
from kv_transfer.tiers.device_pool import take_over
from kv_transfer.tiers.host_tier import HostTier
from kv_transfer.tiers.host_tiering import HostTiering
from kv_transfer.tiers.prefix_tiers import PrefixTiers
from kv_transfer.tiers.settings import TierSettings, make_tiers

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler as _Scheduler
else:
    _Scheduler = object

KEY = "rachis_tiers"
# Requests that are computed, or wait for nothing but a step.
_COMPUTABLE = (RequestStatus.RUNNING, RequestStatus.WAITING, RequestStatus.PREEMPTED)


class TieredScheduling(_Scheduler):
    """See the module."""

    # As how many steps alike, one after the other, the step that ends has been taken: in simulations.
    alike_steps = 1

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # None where vLLM's own order is kept.
        self.tiers: PrefixTiers | None = None
        # The step that has ended last.
        self.stepped: SchedulerOutput | None = None
        # What so many tokens take from host memory, before this engine has copied any: said by whoever swaps requests
        # out, as nothing else can lie there then.
        self.expected_load_s: Callable[[int], float] = lambda tokens: 0.0
        # Requests whose asynchronous loads have failed, as the last step told.
        self.load_failed: list[str] = []
        self._host_tier: HostTier | None = None
        self._async_loads = AsyncLoads()
        self._counted_blocks: dict[str, int] = {}
        # Requests whose prompts are still to be counted.
        self._uncounted: dict[str, Request] = {}
        # Prompt tokens counted of requests that have been scheduled at least once.
        self._begun: dict[str, int] = {}
        given: Mapping[str, Any] | None = self.vllm_config.additional_config.get(KEY)
        pool = vllm_private.pool_of(self)
        if isinstance(self.connector, HostTiering):
            self.connector.use_pool(pool)
        layout = layout_of(self.vllm_config, self.kv_cache_config)
        if given is None or not allows(layout, Feature.TIERS):
            emit_where_blocks_lie(pool)
            return
        settings = TierSettings.of(given)
        connector = self.connector if isinstance(self.connector, HostTiering) else None
        slots = connector.swaps.slots if connector is not None and connector.swaps is not None else 0
        self.tiers = make_tiers(settings, pool.num_gpu_blocks, slots, lambda block: pool.blocks[block].ref_cnt > 0)
        take_over(pool, self.tiers)
        if connector is not None and slots:
            self._host_tier = connector.attach(
                self.tiers,
                pool,
                self.requests,
                settings.copy_blocks,
                self._goes_async,
            )

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        if self.tiers is not None and request.request_id not in self._counted_blocks:
            may_change = getattr(request, "input_open", False)
            self._counted_blocks[request.request_id] = 0 if may_change else len(request.block_hashes)
            if not may_change:
                self._uncounted[request.request_id] = request
                self.tiers.comes(request.block_hashes)

    def tokens_in_host_memory(self, request: Request, device_tokens: int) -> int:
        """Of a waiting request, what would be loaded behind those tokens that it finds on the device."""
        return 0 if self._host_tier is None else self._host_tier.tokens_behind(request, device_tokens)

    @property
    def copying_since_s(self) -> float | None:
        """See `HostTier`."""
        return self._host_tier.copying_since_s if self._host_tier is not None else None

    def is_loading(self, request_id: str) -> bool:
        """Whether it waits until what it found in host memory has been loaded."""
        return self._host_tier is not None and self._host_tier.is_loading(request_id)

    def waits_for_others_load(self, request: Request, device_tokens: int) -> bool:
        """Whether what a waiting request lacks next is on its way from host memory: it is not to be planned."""
        return self._host_tier is not None and self._host_tier.is_arriving(request, device_tokens)

    def _goes_async(self, blocks: int, turned_away: bool) -> bool:
        """Of a load for a request that waits. All others that run, or wait for a step, would be held up by it.

        Of an asynchronous load vLLM wants more free blocks than of what computes at once: it keeps those that others
        will need to end. Where nobody runs who could end, a request that was turned away so would wait for good.
        """
        if turned_away and not self.running:
            return False
        assert self._host_tier is not None
        copy_s = self._host_tier.block_copy_s
        load_s = blocks * copy_s if copy_s is not None else self.expected_load_s(blocks * self.block_size)
        others = sum(each.status in _COMPUTABLE for each in self.requests.values()) - 1
        return self._async_loads.is_cheaper(load_s, others)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        for name in [name for name in self._uncounted if name in self._begun]:
            self._count(name)
        output = super().schedule(throttle_prefills)
        if self._host_tier is not None and output.total_num_scheduled_tokens:
            self._async_loads.began(output, monotonic_s(), waits=output.has_sync_kv_loads)
        return output

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: Any) -> Any:
        self.stepped = scheduler_output
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if self._host_tier is not None:
            self._async_loads.ended(scheduler_output, monotonic_s(), self.alike_steps)
            failed = self._host_tier.take_failed()
            self.load_failed = list(failed)
            for name, tokens in failed.items():
                request = self.requests.get(name)
                if request is not None and not request.is_finished():
                    self._compute_instead(request, tokens)
        return outputs

    def _compute_instead(self, request: Request, tokens: int) -> None:
        """Of what was to be loaded for a request it has no more than these."""
        request.num_computed_tokens = tokens
        self.failed_recving_kv_req_ids.add(request.request_id)
        if request.prefill_stats is not None and not request.num_preemptions:
            request.prefill_stats.set(
                num_prompt_tokens=request.num_prompt_tokens,
                num_local_cached_tokens=tokens,
                num_external_cached_tokens=0,
            )

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        if self.tiers is not None:
            for new in scheduler_output.scheduled_new_reqs:
                if new.req_id not in self._begun:
                    request = self.requests[new.req_id]
                    self._begun[new.req_id] = request.num_prompt_tokens
                    loaded = self._host_tier.loaded_tokens(new.req_id) if self._host_tier is not None else 0
                    # A session's prompt may have become shorter since.
                    loaded = min(loaded, new.num_computed_tokens)
                    stats = request.prefill_stats
                    # There are none of an answer that goes on elsewhere: its prompt was counted when it began.
                    if stats is not None:
                        found = new.num_computed_tokens - (loaded or stats.num_external_cached_tokens)
                        self.tiers.counters.prompt_tokens += request.num_prompt_tokens
                        self.tiers.counters.device_hit_tokens += max(0, found)
                        self.tiers.counters.host_hit_tokens += loaded
            for name in [name for name in self._uncounted if name not in self._begun]:
                self._count(name)
        super()._update_after_schedule(scheduler_output)

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        self._count(request.request_id)
        counted = self._counted_blocks.pop(request.request_id, None)
        if self.tiers is not None and request.request_id in self._begun:
            # A session's prompt has grown since.
            grown = request.num_prompt_tokens - self._begun.pop(request.request_id)
            self.tiers.counters.prompt_tokens += max(0, grown)
        if self.tiers is not None and counted is not None and counted < len(request.block_hashes):
            answer, behind = request.block_hashes[counted:], request.block_hashes[counted - 1] if counted else None
            self.tiers.accessed(answer, counted, tenant_of(request), behind=behind)
        return super()._free_request(request, delay_free_blocks)

    def _count(self, request_id: str) -> None:
        """The request's prompt counts as asked for, unless it has been counted already."""
        request = self._uncounted.pop(request_id, None)
        hashes = request.block_hashes[: self._counted_blocks[request_id]] if request is not None else []
        # A prompt without a full block counts with its answer, if that fills one.
        if self.tiers is not None and request is not None and hashes:
            self.tiers.accessed(hashes, tenant=tenant_of(request))
