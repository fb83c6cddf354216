"""A real scheduler without a model, stepped by hand in the setting of one world, and the clock that goes with it."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib import resources
from math import inf
from typing import Any
from unittest import mock

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    LoRAConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from cluster_core.clock import monotonic_s
from cluster_core.engine_jobs import NOBODY, TENANT_ARG, SessionMode, SessionRecord, TenantShare
from decode_worker import batch_settings, chunk_bounding
from kv_transfer import vllm_private
from kv_transfer.between_steps import LookingStep
from kv_transfer.blocks import Tier
from kv_transfer.tiers import tiered_scheduling
from kv_transfer.tiers.tier_terms import Load
from prefill_worker import scheduler_settings
from prefill_worker.step_limit import TURN_STEP_S
from prefill_worker.step_speed import StepSpeed
from prefill_worker.streaming_request import LOADING, PARKED
from prefill_worker.two_phase import TwoPhase
from tests.campaign.fuzz.kv_checking_runner import KvCheckingRunner
from tests.campaign.fuzz.worlds import World

BLOCK_SIZE = 16
STEP_S = 0.01
MODEL_LEN = 4096
_HASH = get_hash_fn_by_name("sha256_cbor")


class SimulatedEngine:
    """A real scheduler without a model, and the runner that stands in for one; stepped by `turn`.

    scheduler_class: vLLM's own, to compare with. answers: tokens by request; records: those of ended sessions;
    outputs: called with every scheduler output before it is carried out.
    """

    def __init__(self, world: World, scheduler_class: type | None = None) -> None:
        self.world = world
        self.scheduler, self._hasher = _make_scheduler(scheduler_class or world.scheduler_class, world)
        if world.is_measured:
            # Steps take no time here: as if they had been measured, and a short one had a block.
            self.scheduler._speed = KnownSpeed()
        self.runner = KvCheckingRunner(
            v2=world.v2,
            blocks=world.blocks,
            block_size=BLOCK_SIZE,
            places=world.places,
            host_slots=world.host_slots,
            adapters=world.adapters_in_step if world.adapters else 0,
            copy_s=world.copy_s,
        )
        self.answers: dict[str, list[int]] = {}
        self.records: dict[str, SessionRecord] = {}
        self.outputs: list[Any] = []
        self._in_flight: deque[tuple[Any, Any]] = deque()
        self._look = LookingStep(self.scheduler, self.runner, lambda: ({}, True))

    @property
    def remote_tokens(self) -> dict[str, int]:
        """Of which request how many tokens can be loaded from elsewhere."""
        remote: dict[str, int] = self.scheduler.connector.remote_tokens
        return remote

    def request(
        self,
        name: str,
        prompt: list[int],
        max_tokens: int,
        transfer: dict[str, Any] | None = None,
        tenant: TenantShare = NOBODY,
        **fields: Any,
    ) -> Request:
        """transfer: what vLLM's connector is told of its KV."""
        extra = {TENANT_ARG: tenant} if tenant.tenant_id else None
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, extra_args=extra)
        request = Request(name, list(prompt), params, None, block_hasher=self._hasher, **fields)
        request.kv_transfer_params = transfer
        return request

    def add(self, name: str, prompt: list[int], max_tokens: int = 1, **fields: Any) -> None:
        self.scheduler.add_request(self.request(name, prompt, max_tokens, **fields))

    def open(
        self,
        name: str,
        prompt: list[int],
        max_tokens: int = 1,
        mode: SessionMode = SessionMode.UPDATE,
        **fields: Any,
    ) -> None:
        self.scheduler.open_session(self.request(name, prompt, max_tokens, **fields), mode)

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def turn(self) -> bool:
        """One turn of the engine. False: nothing was left to do."""
        if self.world.looks:
            found, goes_on = self._look()
            self._take(found or {})
            if not goes_on:
                return True
        if self.scheduler.has_requests() and len(self._in_flight) < self.world.depth:
            output = self.scheduler.schedule()
            self.outputs.append(output)
            self._in_flight.append((output, self.runner.step(output)))
            if len(self._in_flight) < self.world.depth and output.total_num_scheduled_tokens:
                return True
        if not self._in_flight:
            return bool(self.scheduler.has_requests())
        self._take(self.scheduler.update_from_output(*self._in_flight.popleft()))
        return True

    def _take(self, outputs: Mapping[int, Any]) -> None:
        for each in (output for of_client in outputs.values() for output in of_client.outputs):
            self.answers.setdefault(each.request_id, []).extend(each.new_token_ids)
            self._take_record(each.request_id)

    def drain(self, most_turns: int = 2000) -> None:
        """Turns until nothing is left to do. Raises AssertionError when that does not end."""
        for _ in range(most_turns):
            if not self.turn():
                return
            self.check_invariants()
        raise AssertionError(f"stuck: {sorted(self.scheduler.requests)}")

    def is_swapped(self, name: str) -> bool:
        return bool(self.scheduler.swaps.tokens(name))

    def free_blocks(self) -> int:
        return int(vllm_private.pool_of(self.scheduler).get_num_free_blocks())

    def computable(self) -> list[str]:
        """Requests that have tokens to compute and wait for nothing but a step; those that are held back once they are
        overdue."""
        swaps = self.scheduler.swaps
        are_held = getattr(self.scheduler, "held_nap_s", 0.0)
        overdue_since_s = monotonic_s() - self.world.starvation_s if are_held else inf
        return [
            name
            for name, request in self.scheduler.requests.items()
            if not request.is_finished()
            and request.status not in (LOADING, PARKED)
            and not (request.lost_idle and request.input_open)
            and (request.waiting_since_s <= overdue_since_s or not request.input_open)
            and max(request.num_computed_tokens, swaps.tokens(name) if swaps is not None else 0) < request.num_tokens
        ]

    def check_invariants(self) -> None:
        """Every block is free or held by as many as it counts, every host slot is free or held by one.

        And nobody waits who has nothing to compute: the engine would turn and turn.
        """
        scheduler, swaps = self.scheduler, self.scheduler.connector.swaps
        swaps.check_invariants()
        if isinstance(scheduler, TwoPhase):
            # What was learned, and who is here, is looked at nowhere else.
            scheduler._survival.check_invariants()
            scheduler._turns.check_invariants()
            scheduler._mix.check_invariants()
        pool, host_tier = vllm_private.pool_of(scheduler), scheduler.connector.host_tier
        if host_tier is not None:
            pool.check_invariants()
            self._check_slots()
        (manager,) = scheduler.kv_cache_manager.coordinator.single_type_managers
        held = [block for blocks in manager.req_to_blocks.values() for block in blocks]
        held += [block for _, blocks in scheduler.deferred_frees for block in blocks]
        held += host_tier.held_blocks() if host_tier is not None else []
        owners: dict[int, int] = {}
        for block in held:
            owners[block.block_id] = owners.get(block.block_id, 0) + 1
        for block in held:
            expected = owners[block.block_id]
            assert block.ref_cnt == expected, f"block {block.block_id}: {block.ref_cnt} references, {expected} owners"
        free = self.free_blocks()
        assert free + len(owners) == self.world.blocks - 1, f"{free} free and {len(owners)} held blocks"
        for request in (*scheduler.waiting, *scheduler.kv_holding_waiting):
            if request.status is RequestStatus.WAITING:
                ready = max(request.num_computed_tokens, swaps.tokens(request.request_id))
                assert ready < request.num_tokens, f"{request.request_id} waits with nothing to compute"

    def _check_slots(self) -> None:
        """Between two steps a slot is free, a swapped session's, in the tree, or written by a copy under way, or read
        by one which brings a session back."""
        tiers, swaps = self.scheduler.tiers, self.scheduler.connector.swaps
        # Slots of copies under way, and of those that the next step makes, are counted by nobody in public.
        pending, under_way = swaps._pending.slots_after, self.scheduler.connector.host_tier._running.values()
        cached, copying = tiers.tree.blocks[Tier.HOST], len(tiers._copying)
        loads = [each.plan for each in under_way if isinstance(each.plan, Load)]
        resuming = sum(len(load.slots) for load in loads if load.is_swapped)
        owned = cached + copying + resuming + swaps.used_slots + len(pending)
        assert tiers.slots.free + owned == self.world.host_slots, "a slot is lost or owned twice"

    def check_idle(self) -> None:
        """Nothing is left of anything."""
        scheduler = self.scheduler
        assert self.free_blocks() == self.world.blocks - 1
        assert scheduler.connector.swaps.free_slots == self.world.host_slots
        assert not scheduler.requests
        if self.world.decode is None or self.world.is_shared:
            # A leak of state of requests that have ended is visible nowhere else.
            assert not scheduler._survival._sessions
            assert not scheduler._sessions
            assert not scheduler._late_input
            assert not scheduler._ended
            assert scheduler._mix.alone is None
        if self.world.decode is not None:
            # Likewise, of those that decode.
            assert not scheduler._asked
            assert not scheduler._decoding_since
        tier = scheduler.connector.host_tier
        if tier is not None:
            # Likewise, of those that were loaded.
            assert not (tier._hits or tier._resumes or tier._loaded or tier._arriving or tier._computing)
            assert not (tier._landed or tier._failed)
        # Likewise, in both kinds of scheduler.
        assert not scheduler._begun
        assert not scheduler._uncounted
        assert not scheduler._counted_blocks
        assert scheduler.num_waiting_for_streaming_input == 0

    def _take_record(self, name: str) -> None:
        take = getattr(self.scheduler, "take_session_record", None)
        record = take(name) if take else None
        if record is not None:
            self.records[name] = record


class SteppedClock:
    """Seconds that pass when `advance` says so. Stands for the monotonic clock while it is a context."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        # vLLM reads this clock itself and takes no other.
        self._patch = mock.patch("time.monotonic", lambda: self.now_s)

    def advance(self, seconds: float) -> None:
        self.now_s += seconds

    def __enter__(self) -> "SteppedClock":
        self._patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.stop()


class KnownSpeed(StepSpeed):
    """That of an engine whose steps take no time."""

    def __init__(self, tokens_per_s: float = 100.0) -> None:
        super().__init__()
        self.tokens_per_s = tokens_per_s

    @property
    def turn_step_tokens(self) -> float:
        return self.tokens_per_s * TURN_STEP_S

    def began(self, step: object, tokens: int, now_s: float) -> None:
        return


def _lora(world: World) -> LoRAConfig:
    return LoRAConfig(max_loras=world.adapters_in_step, max_cpu_loras=world.adapters + 1)


def _make_scheduler(kind: type, world: World) -> tuple[Any, Callable[..., Any]]:
    """(scheduler without a model, its block hasher)."""
    asynchronous = world.depth > 1
    scheduling = SchedulerConfig(
        max_num_seqs=world.places,
        max_num_batched_tokens=world.token_budget,
        max_model_len=MODEL_LEN,
        is_encoder_decoder=False,
        enable_chunked_prefill=True,
        async_scheduling=asynchronous,
    )
    streaming = {key: getattr(world, key) for key in ("policy", "preemption", "starvation_s")}
    config = VllmConfig(
        model_config=ModelConfig(model=str(resources.files("builtin_model") / "weights"), max_model_len=MODEL_LEN),
        scheduler_config=scheduling,
        cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True),
        device_config=DeviceConfig("cpu"),
        lora_config=_lora(world) if world.adapters else None,
        kv_transfer_config=KVTransferConfig(
            kv_connector="SlowLoadConnector",
            kv_connector_module_path="tests.campaign.fuzz.slow_load",
            kv_role="kv_both" if world.consumer else "kv_producer",
            kv_connector_extra_config={"rachis_host_bytes": world.host_slots},
        ),
        additional_config={
            scheduler_settings.KEY: {**streaming, "cost_profile": None},
            tiered_scheduling.KEY: _tiers(world) if world.tiers else None,
            batch_settings.KEY: asdict(world.decode) if world.decode is not None else None,
            chunk_bounding.KEY: {
                "tpot_s": world.tpot_s,
                "ttft_s": world.ttft_s,
                "best_effort": {"ttft_s": world.best_effort_ttft_s, "tpot_s": world.best_effort_tpot_s},
            },
        },
    )
    # The CPU platform switches asynchronous scheduling off and sets its own block size.
    config.scheduler_config.async_scheduling = asynchronous
    config.cache_config.block_size = BLOCK_SIZE
    config.cache_config.num_gpu_blocks = world.blocks
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
    scheduler = kind(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=world.blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
        log_stats=True,
    )
    scheduler.use_v2_model_runner = world.v2
    init_none_hash(_HASH)
    return scheduler, get_request_block_hasher(BLOCK_SIZE, _HASH)


def _tiers(world: World) -> dict[str, Any]:
    return {
        "eviction": world.eviction,
        "admission": world.admission,
        "frequency_threshold": world.frequency_threshold,
        "copy_blocks": 7,
        "promotion": world.promotion,
        "promotion_blocks": 5,
        "promotion_pause": 2,
        "filter_entries": 1024,
        "requests_per_epoch": 4,
    }
