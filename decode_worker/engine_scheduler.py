"""The schedulers of decode workers: vLLM's own, with bounded steps, decode batches by prefix and tiers.

The parts are `decode_worker.step_bound`, `decode_worker.batching` and `kv_transfer.tiers.prefix_tiers`.
"""

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from decode_worker.adapter_places import AdapterPlaces
from decode_worker.batch_scheduling import BatchScheduling
from decode_worker.chunk_bounding import ChunkBounding
from kv_transfer.tiers.tiered_scheduling import TieredScheduling


class DecodeScheduler(ChunkBounding, BatchScheduling, TieredScheduling, AdapterPlaces, Scheduler):
    """For engines that run one step at a time."""


class AsyncDecodeScheduler(ChunkBounding, BatchScheduling, TieredScheduling, AdapterPlaces, AsyncScheduler):
    """For engines that schedule a step while the one before runs."""
