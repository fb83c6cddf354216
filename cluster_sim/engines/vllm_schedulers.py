"""vLLM's scheduler classes, real ones, with what they need around them to run without a model and in simulated time.

Made by `make_scheduler`: the scheduler of a worker with a block pool that says which blocks come and go, a connector
that pulls and hands off as `kv_transfer.engine_connector` does but transfers nothing, and a clock that stands still.
Prompts have the names of their blocks from the trace, so nothing is hashed.
"""

import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from enum import Enum
from importlib import resources
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata
from vllm.v1.core.kv_cache_utils import get_block_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from cluster_configs.preemption_costs import CostModel as PreemptionCosts
from decode_worker import batch_settings
from decode_worker.batch_settings import BatchSettings
from decode_worker.engine_scheduler import DecodeScheduler
from kv_transfer import vllm_private
from kv_transfer.blocks import Tier
from kv_transfer.claims.block_events import EventfulBlockPool
from kv_transfer.claims.claims import ClaimChange
from kv_transfer.claims.prefix_chunks import Keys
from kv_transfer.tiers import tiered_scheduling
from kv_transfer.tiers.host_tiering import HostTiering
from kv_transfer.tiers.settings import TierSettings
from prefill_worker import scheduler_settings
from prefill_worker.engine_scheduler import StreamingScheduler

PULLS, HANDS_OFF = "do_remote_prefill", "do_remote_decode"
_KEY = np.dtype(">u8")
_KEY_BYTES = _KEY.itemsize


class SchedulerKind(Enum):
    """PLAIN: vLLM's own. STREAMING: that of the prefill pool. DECODE: that of the decode pool."""

    PLAIN = "plain"
    STREAMING = "streaming"
    DECODE = "decode"


_CLASSES: dict[SchedulerKind, type] = {
    SchedulerKind.PLAIN: Scheduler,
    SchedulerKind.STREAMING: StreamingScheduler,
    SchedulerKind.DECODE: DecodeScheduler,
}


@dataclass(frozen=True, slots=True)
class VllmEngineSettings:
    """device_blocks, host_blocks: of KV. max_running_requests, max_batched_tokens: of one step. max_model_tokens: of a
    prompt and its answer. step_start_s: what the engine takes for a step that goes on with no request of the step
    before; else it is hidden behind that one.

    policy, preemption, starvation_s: of streaming schedulers, with the meaning of `cluster_configs.schema`;
    preemption_costs: what `cost` compares, None for rough figures. decode: of decode schedulers. tiers: of both; None
    for the order of eviction that a plain scheduler has, which uses no host memory for prefixes. seed: of decode
    policies that explore. leaps: whether steps that are sure to be alike are taken at once.
    """

    kind: SchedulerKind
    block_tokens: int
    device_blocks: int
    host_blocks: int = 0
    max_running_requests: int = 256
    max_batched_tokens: int = 8192
    max_model_tokens: int = 1 << 20
    step_start_s: float = 0.0
    prefix_caching: bool = True
    policy: str = "fcfs"
    preemption: str = "cost"
    starvation_s: float = 5.0
    preemption_costs: PreemptionCosts | None = None
    decode: BatchSettings = field(default_factory=BatchSettings)
    tiers: TierSettings | None = field(default_factory=TierSettings)
    seed: int = 0
    leaps: bool = True


class SimClock:
    """Simulated seconds; while it is a context, the monotonic clock of this process shows them."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._real = time.monotonic

    def _read(self) -> float:
        return self.now_s

    def __enter__(self) -> None:
        self._real = time.monotonic
        time.monotonic = self._read

    def __exit__(self, *_: object) -> None:
        time.monotonic = self._real


class BlockNames:
    """Names the full blocks of one request for vLLM, as its block hasher: a prompt's by the keys of the trace, others
    by the request's number. `known` takes the keys of a prompt that has changed."""

    def __init__(self, number: int, keys: Keys, block_tokens: int) -> None:
        self._number = number
        self._block_tokens = block_tokens
        self._version = 0
        self._names = _names(keys)

    def known(self, keys: Keys) -> None:
        self._names = _names(keys)
        self._version += 1

    def __call__(self, request: Any) -> list[bytes]:
        """Those that the request does not have yet."""
        have, full = len(request.block_hashes), request.num_tokens // self._block_tokens
        if full <= have:
            return []
        named = self._names[have:full]
        own = self._number.to_bytes(8, "big") + self._version.to_bytes(4, "big")
        return named + [own + place.to_bytes(4, "big") for place in range(have + len(named), full)]


def _names(keys: Keys) -> list[bytes]:
    packed = keys.astype(_KEY).tobytes()
    return [packed[start : start + _KEY_BYTES] for start in range(0, len(packed), _KEY_BYTES)]


class WatchedBlockPool(EventfulBlockPool):
    """Mixed into a pool that vLLM, or the tiers, have made: keeps which blocks of prompts have come and gone."""

    # By tier: what has come or gone since the last `claim_changes`, and what was there then.
    touched: tuple[dict[bytes, bool], dict[bytes, bool]]
    claimed: tuple[set[bytes], set[bytes]]

    def cache_full_blocks(
        self, request: Any, blocks: Any, num_cached_blocks: int, num_full_blocks: int, *args: Any, **kwargs: Any
    ) -> None:
        super().cache_full_blocks(request, blocks, num_cached_blocks, num_full_blocks, *args, **kwargs)
        hashes = request.block_hashes[num_cached_blocks:num_full_blocks]
        self.touched[Tier.DEVICE].update(dict.fromkeys(hashes, True))

    def add_event(self, tier: Tier, hashes: Sequence[Any], group: int, *, there: bool) -> None:
        self.touched[tier].update(dict.fromkeys(hashes, there))

    def _emit_block_removed_events(self, block_hashes: list[Any]) -> None:
        known, device = self.cached_block_hash_to_block, self.touched[Tier.DEVICE]
        for each in block_hashes:
            device[get_block_hash(each)] = known.get_one_block(each) is not None

    def claim_changes(self) -> ClaimChange:
        """What has changed since the last call, of blocks with keys."""
        changes = []
        for claimed, touched in zip(self.claimed, self.touched, strict=True):
            come = [each for each, there in touched.items() if there and len(each) == _KEY_BYTES]
            come = [each for each in come if each not in claimed]
            gone = [each for each, there in touched.items() if not there and each in claimed]
            claimed.update(come)
            claimed.difference_update(gone)
            touched.clear()
            changes += [_keys(come), _keys(gone)]
        return ClaimChange(*changes)


def _keys(names: Sequence[bytes]) -> Keys:
    return np.frombuffer(b"".join(names), dtype=_KEY).astype(np.uint64)


class _Transfers(KVConnectorBase_V1):
    """What `kv_transfer.engine_connector` answers the scheduler, without a transfer.

    pulled: requests that have got their blocks, and the tokens they lack, since the list was last cleared.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.pulled: list[tuple[str, int]] = []

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        pulls = (request.kv_transfer_params or {}).get(PULLS)
        remote = request.num_prompt_tokens - num_computed_tokens if pulls else 0
        return remote, remote > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        params = request.kv_transfer_params or {}
        if params.get(PULLS):
            # Once: a request that is preempted afterwards computes its prompt itself.
            params[PULLS] = False
            self.pulled.append((request.request_id, num_external_tokens))

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        hands_off = (request.kv_transfer_params or {}).get(HANDS_OFF, False)
        return hands_off and request.status is RequestStatus.FINISHED_LENGTH_CAPPED, None

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        raise NotImplementedError("there is no model")

    def wait_for_layer_load(self, layer_name: str) -> None:
        raise NotImplementedError("there is no model")

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        raise NotImplementedError("there is no model")

    def wait_for_save(self) -> None:
        raise NotImplementedError("there is no model")


class SimConnector(HostTiering, _Transfers):
    """The scheduler's side of a worker's connector."""


def make_scheduler(settings: VllmEngineSettings) -> Any:
    """A scheduler without a model."""
    with _quiet():
        return _make_scheduler(settings)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without vLLM's advice for models that are served."""
    logger = logging.getLogger("vllm")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _make_scheduler(settings: VllmEngineSettings) -> Any:
    model = ModelConfig(model=str(resources.files("builtin_model") / "weights"), seed=settings.seed)
    model.max_model_len = settings.max_model_tokens
    streaming = {key: getattr(settings, key) for key in ("policy", "preemption", "starvation_s")}
    config = VllmConfig(
        model_config=model,
        scheduler_config=SchedulerConfig(
            max_num_seqs=settings.max_running_requests,
            max_num_batched_tokens=settings.max_batched_tokens,
            max_model_len=settings.max_model_tokens,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            async_scheduling=False,
        ),
        cache_config=CacheConfig(block_size=settings.block_tokens, enable_prefix_caching=settings.prefix_caching),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(
            kv_connector=SimConnector.__name__,
            kv_connector_module_path=__name__,
            kv_role="kv_both",
            # Blocks of a model without layers have no bytes: this counts blocks.
            kv_connector_extra_config={"rachis_host_bytes": settings.host_blocks},
        ),
        additional_config={
            scheduler_settings.KEY: {**streaming, "cost_profile": None},
            tiered_scheduling.KEY: _flat(settings.tiers) if settings.tiers is not None else None,
            batch_settings.KEY: asdict(settings.decode),
        },
    )
    # The CPU platform sets its own.
    config.cache_config.block_size = settings.block_tokens
    # vLLM keeps one block for itself.
    config.cache_config.num_gpu_blocks = settings.device_blocks + 1
    spec = FullAttentionSpec(block_size=settings.block_tokens, num_kv_heads=1, head_size=1, dtype=torch.float32)
    scheduler: Any = _CLASSES[settings.kind](
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=settings.device_blocks + 1,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=settings.block_tokens,
        hash_block_size=settings.block_tokens,
        log_stats=False,
    )
    # The runner that GPUs have by default: it gets prompts by reference.
    scheduler.use_v2_model_runner = True
    if settings.preemption_costs is not None:
        with suppress(AttributeError):
            scheduler.cost_model = settings.preemption_costs
    pool = vllm_private.pool_of(scheduler)
    pool.__class__ = type("WatchedBlockPool", (WatchedBlockPool, type(pool)), {})
    pool.touched, pool.claimed = ({}, {}), (set(), set())
    return scheduler


def _flat(tiers: TierSettings) -> dict[str, Any]:
    """As the configuration's section."""
    given = asdict(tiers)
    return {**given.pop("rules"), **given}
