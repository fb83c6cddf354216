"""Every private member of vLLM that Rachis touches, but for the methods of `OVERRIDDEN`.

vLLM's plug-in points do most of what is needed; what they leave out is reached here, for the one version the lock
files pin. `tests/integration/test_vllm_private.py` fails loudly on another version, that and
`test_vllm_private_scheduler.py` beside it on a renamed member, and `tests/pure/kv_transfer/test_vllm_private.py` for a
private member that is touched elsewhere.
"""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from kv_transfer.kv_layout import layout_of
from kv_transfer.model_features import Feature, allows

SUPPORTED_VLLM = "0.32.0"

# Private methods of vLLM's classes that subclasses override and call, which cannot be moved here: by file.
OVERRIDDEN: Mapping[str, tuple[str, ...]] = {
    "decode_worker/batch_scheduling.py": ("Scheduler._free_request", "Scheduler._preempt_request"),
    "decode_worker/chunk_bounding.py": ("Scheduler._free_request",),
    "kv_transfer/claims/block_events.py": ("BlockPool._emit_block_removed_events",),
    "kv_transfer/handoff/emitted_output.py": ("Scheduler._handle_blocked_waiting_request",),
    "decode_worker/adapter_places.py": ("Scheduler._handle_blocked_waiting_request",),
    "kv_transfer/model_runners.py": (
        "CPUModelRunner._bookkeeping_sync",
        "CPUModelRunner._sample",
        "GPUModelRunner._may_reorder_batch",
    ),
    "kv_transfer/tiers/device_pool.py": ("BlockPool._remove_cached_block_hashes",),
    "kv_transfer/tiers/tiered_scheduling.py": ("Scheduler._free_request", "Scheduler._update_after_schedule"),
    "prefill_worker/engine_scheduler.py": ("Scheduler._update_after_schedule",),
    "prefill_worker/two_phase.py": ("Scheduler._inflight_prefill_reserved_blocks",),
    "prefill_worker/turn_taking.py": ("Scheduler._free_request",),
}


def scheduler_of(engine: Any) -> Any:
    """The scheduler of an in-process `LLMEngine`."""
    return engine.engine_core.engine_core.scheduler


def connector_of(engine: Any) -> Any:
    """The scheduler-side KV connector, or None."""
    return scheduler_of(engine).get_kv_connector()


def block_counts(engine: Any) -> tuple[int, int]:
    """(free blocks, blocks in all) of the device pool; vLLM keeps one null block for itself."""
    pool = scheduler_of(engine).kv_cache_manager.block_pool
    return pool.get_num_free_blocks(), pool.num_gpu_blocks - 1


def queue_lengths(engine: Any) -> tuple[int, int]:
    """(running, waiting) requests; those that wait for remote KV count as waiting, parked sessions as neither."""
    scheduler = scheduler_of(engine)
    waiting = len(scheduler.waiting) + len(scheduler.kv_holding_waiting) - scheduler.num_waiting_for_streaming_input
    return len(scheduler.running), waiting


def session_counts(engine: Any) -> tuple[int, int, int]:
    """(open sessions, free host blocks, host blocks in all); zeros for an engine without sessions."""
    scheduler = scheduler_of(engine)
    swaps = getattr(scheduler, "swaps", None)
    sessions: int = getattr(scheduler, "session_count", 0)
    return (sessions, swaps.free_slots, swaps.slots) if swaps is not None else (sessions, 0, 0)


def tiers_of(engine: Any) -> Any:
    """The tiers of cached prefixes, or None."""
    return getattr(scheduler_of(engine), "tiers", None)


def decode_report_of(engine: Any) -> Any:
    """How the decode scheduler forms its batch, or None."""
    report = getattr(scheduler_of(engine), "decode_report", None)
    return report() if report is not None else None


def decode_batch_of(engine: Any, at_most: int) -> Any:
    """The decode scheduler's batch in detail, or None."""
    batch = getattr(scheduler_of(engine), "decode_batch", None)
    return batch(at_most) if batch is not None else None


def tell_costs(engine: Any, measured: Callable[[], Any]) -> None:
    """A scheduler that bounds its steps by what work costs asks `measured` for that from now on."""
    use_costs = getattr(scheduler_of(engine), "use_costs", None)
    if use_costs is not None:
        use_costs(measured)


def bound_metadata(connector: Any) -> Any:
    """What the scheduler side of a connector has built for the step that its worker side is in; None outside of one."""
    return connector._connector_metadata


def workers_of(connector: Any) -> int:
    """How many workers the engine of a connector has."""
    workers: int = connector._vllm_config.parallel_config.world_size
    return workers


def rank_of(connector: Any) -> int:
    """Of the worker that has this side of a connector, among those of its engine."""
    return int(connector.connector_worker.tp_rank)


def publish_block(pool: Any, keyed_hash: Any, block: Any) -> None:
    """From now on a prompt finds this block under its hash. Without an event."""
    pool._insert_block_hash(keyed_hash, block, None)


def quarantined_blocks(engine: Any) -> int:
    """Device blocks that overdue pulls may still write into."""
    quarantine = getattr(scheduler_of(engine).connector, "quarantine", None)
    return len(quarantine) if quarantine is not None else 0


def blocks_held_by_transfers(scheduler: Any) -> int:
    """Device blocks that only copies to or from host memory refer to, or pulls that were given up."""
    host_tier = getattr(scheduler.connector, "host_tier", None)
    quarantine = getattr(scheduler.connector, "quarantine", None)
    held = [] if host_tier is None else host_tier.held_blocks()
    references = Counter(block.block_id for block in [*held, *(quarantine.blocks if quarantine else ())])
    blocks = pool_of(scheduler).blocks
    return sum(blocks[each].ref_cnt == count for each, count in references.items())


def hand_over_block_events(engine: Any, publisher: Any) -> None:
    """vLLM's scheduler publishes the block events of every step to this one of ours from now on."""
    scheduler_of(engine).kv_event_publisher = publisher


def take_block_events(engine: Any) -> list[Any]:
    """Block events that came after those of the last step."""
    events: list[Any] = scheduler_of(engine).kv_cache_manager.take_events()
    return events


def claims_group(engine: Any) -> int:
    """The group of layers whose block events cover whole prefixes: the first with full attention; -1: there is none."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    groups = scheduler_of(engine).kv_cache_config.kv_cache_groups
    kinds = [isinstance(group.kv_cache_spec, FullAttentionSpec) for group in groups]
    return kinds.index(True) if True in kinds else -1


def published_hashes(engine: Any, group: int) -> list[Any]:
    """Of the blocks of a group that a prompt can find in the device's pool. O(blocks)."""
    from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id

    keys = pool_of(scheduler_of(engine)).cached_block_hash_to_block._cache
    return [get_block_hash(key) for key in keys if get_group_id(key) == group]


def leased_request_ids(engine: Any) -> set[str]:
    """Finished requests that the scheduler keeps because their blocks are leased or still being received."""
    return {name for name, request in scheduler_of(engine).requests.items() if request.is_finished()}


def expire_lease(connector: Any, request_id: str) -> None:
    """Ends a lease now: the worker side reaps it with its next step, as it would at the lease's own end."""
    connector.connector_scheduler._reqs_need_send[request_id] = time.perf_counter()


def hand_over(engine: Any, request_id: str, params: Mapping[str, Any]) -> dict[str, Any] | None:
    """Ends a request that decodes as vLLM ends a prefill whose blocks will be pulled, and returns what it says then.

    None where it does not decode now, or its KV cannot be leased: nothing has changed. params: of such a prefill.
    """
    from vllm.v1.request import RequestStatus

    scheduler, connector = scheduler_of(engine), connector_of(engine)
    request = scheduler.requests.get(request_id)
    if request is None or request.status is not RequestStatus.RUNNING or request not in scheduler.running:
        return None
    ready = request.num_tokens - 1
    # vLLM counts what is scheduled: of a request that computes again after it was preempted, all may be under way.
    computed = request.num_computed_tokens - request.num_in_flight_tokens
    leases = not connector.connector_scheduler.use_host_buffer and allows(
        layout_of(scheduler.vllm_config, scheduler.kv_cache_config), Feature.HAND_OVER
    )
    if not request.num_output_tokens or computed < ready or not leases:
        return None
    # A step that is under way computes the last token as well: nobody will ask for that.
    request.num_computed_tokens = ready
    request.kv_transfer_params = dict(params)
    # Its workers lease what they know to have been computed for another engine.
    connector.connector_scheduler._reqs_in_batch.add(request_id)
    connector.has_untold_leases = True
    scheduler.running.remove(request)
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    lease, _ = scheduler._free_request(request)
    engine.abort_request([request_id], internal=True)
    said: dict[str, Any] | None = lease
    return said


def stop_lease_renewal(connector: Any, request_id: str) -> None:
    """The decode side stops renewing the lease of a request that it will not pull."""
    connector.connector_scheduler._stop_heartbeat(request_id)


def give_up_pull(connector: Any, request_id: str) -> list[Any] | None:
    """A worker forgets a pull that it waits for: handles of its transfers that are under way.

    None where it waits for none of that name. One whose handshake is not done reads nothing once it is: its other end
    is told then, as by whoever has all blocks already. (That the handshake's thread has queued it must not matter: it
    does so whenever it likes.)
    """
    worker = connector.connector_worker
    meta = worker._recving_metadata.pop(request_id, None)
    if meta is None:
        return None
    meta.local_block_ids = meta.local_physical_block_ids = ()
    meta.awaiting_kvs = False
    worker._pending_recv_notifs.pop(request_id, None)
    worker._recv_failures.discard(request_id)
    handles: list[Any] = worker._recving_transfers.pop(request_id, [])
    return handles


def take_ended_transfers(connector: Any, transfers: dict[str, list[Any]]) -> set[str]:
    """Removes from `transfers` those that are over, and releases them; returns the requests that have none left."""
    ended: set[str] = connector.connector_worker._pop_done_transfers(transfers)[0]
    return ended


def bytes_per_block(kv_cache_config: Any) -> int:
    """Device bytes of one block over all layers."""
    return sum(tensor.size for tensor in kv_cache_config.kv_cache_tensors) // kv_cache_config.num_blocks


def block_bytes(engine: Any) -> int:
    """Device bytes of one block of an in-process `LLMEngine`: each rank has its share of every block."""
    config = engine.vllm_config.parallel_config
    return bytes_per_block(scheduler_of(engine).kv_cache_config) * config.tensor_parallel_size


def block_views(kv_cache_config: Any, kv_caches: dict[str, Any]) -> list[Any]:
    """The device's KV memory as int8 tensors of shape (blocks, bytes of one block), one for each layer's own memory."""
    import torch
    from vllm.v1.kv_cache_interface import group_kernel_blocks

    views: dict[tuple[int, tuple[int, ...]], Any] = {}
    blocks = kv_cache_config.num_blocks
    for group in kv_cache_config.kv_cache_groups:
        for layer_name in group.layer_names:
            layer = group_kernel_blocks(kv_caches[layer_name], blocks)
            stride, page = layer.stride(0) * layer.element_size(), group.kv_cache_spec.page_size_bytes
            flat = torch.tensor([], dtype=torch.int8, device=layer.device)
            offset = layer.storage_offset() * layer.element_size()
            view = flat.set_(layer.untyped_storage(), offset, (blocks, page), (stride, 1))
            views.setdefault((view.data_ptr(), view.stride()), view)
    return list(views.values())


def prompt_tokens_left_out(connector: Any) -> int:
    """Last tokens of a prompt that NIXL's prefill side leaves to the decode side: one where layers keep a state."""
    return int(connector.connector_scheduler._prefill_backoff())


def request_blocks(scheduler: Any, request_id: str) -> list[Any]:
    """The device blocks of a request, in order; the manager's own list. Empty when it has none."""
    (manager,) = scheduler.kv_cache_manager.coordinator.single_type_managers
    blocks: list[Any] = manager.req_to_blocks.get(request_id, [])
    return blocks


def shared_blocks(blocks: list[Any]) -> int:
    """How many of a request's blocks others hold as well. They lie in front: a block is shared with all before it."""
    if not blocks or blocks[0].ref_cnt == 1:
        return 0
    return bisect_left(range(len(blocks)), True, key=lambda index: blocks[index].ref_cnt == 1)


def blocks_in_use(blocks: Any) -> int:
    """How many of the blocks of a prefix hit are held by other requests: adopting those takes no free block."""
    return sum(block.ref_cnt > 0 for group in blocks.blocks for block in group)


def model_runner_of(engine: Any) -> Any:
    """Of an in-process `LLMEngine` with one rank."""
    return engine.model_executor.driver_worker.worker.model_runner


def is_cached(scheduler: Any, block_hash: Any) -> bool:
    """Whether the KV of the block with this hash of vLLM's lies on the device. One group of blocks only."""
    return isinstance(block_hash, bytes) and pool_of(scheduler).get_cached_block(block_hash, [0]) is not None


def drop_reservation(scheduler: Any, request: Any) -> None:
    """No blocks are reserved any more for the rest of its prefill: vLLM does not see that it does not run."""
    scheduler._inflight_prefills.discard(request)


def pool_of(scheduler: Any) -> Any:
    return scheduler.kv_cache_manager.block_pool


def truncate_blocks(scheduler: Any, request: Any, keep_tokens: int) -> int:
    """Frees a request's blocks beyond its first `keep_tokens` tokens; returns how many tokens keep their KV.

    That is fewer where `keep_tokens` ends inside a block which others may read: one that is published in the prefix
    cache or shared is never written again, so it is given up as a whole. An engine step in flight may still write into
    what is freed here: as everywhere in vLLM, later steps write after it, and a connector that would not wait for it
    makes the scheduler defer the freeing.
    """
    (manager,) = scheduler.kv_cache_manager.coordinator.single_type_managers
    blocks = manager.req_to_blocks.get(request.request_id, [])
    pool, size = scheduler.kv_cache_manager.block_pool, manager.block_size
    keep_tokens = min(keep_tokens, len(blocks) * size)
    if keep_tokens % size and not pool.is_block_writable(blocks[keep_tokens // size]):
        keep_tokens -= keep_tokens % size
    keep = -(-keep_tokens // size)
    freed = blocks[keep:]
    del blocks[keep:]
    cached = manager.num_cached_block.get(request.request_id, 0)
    manager.num_cached_block[request.request_id] = min(cached, keep_tokens // size)
    if not blocks:
        manager.req_to_blocks.pop(request.request_id, None)
        manager.num_cached_block.pop(request.request_id, None)
    if freed and scheduler._request_blocks_can_be_freed(request):
        pool.free_blocks(reversed(freed))
    elif freed:
        scheduler.deferred_frees.append((scheduler.sched_step_seq, freed))
    return keep_tokens


def adapter_of(request: Any) -> int:
    """vLLM's number of its LoRA adapter; 0: none."""
    return request.lora_request.lora_int_id if request.lora_request is not None else 0


def core_request(engine: Any, request_id: str, prompt: Any, params: Any, **more: Any) -> Any:
    """vLLM's own request for a prompt in its form, checked and named as by `LLMEngine.add_request`, added nowhere.
    more: of `process_inputs`."""
    tasks = engine.get_supported_tasks()
    request = engine.input_processor.process_inputs(request_id, prompt, params, supported_tasks=tasks, **more)
    engine.input_processor.assign_request_id(request)
    return request


def start_grammar(engine: Any, request: Any) -> None:
    """Of a request that vLLM does not take in by itself; nothing waits for its grammar to be compiled."""
    from vllm.v1.request import RequestStatus

    if request.use_structured_output:
        engine.engine_core.engine_core.structured_output_manager.grammar_init(request)
        request.status = RequestStatus.WAITING


def block_hasher(engine: Any) -> Any:
    return engine.engine_core.engine_core.request_block_hasher


def expect_outputs(engine: Any, core_request: Any) -> None:
    """Makes the front end ready for the outputs of a request that the scheduler knows already."""
    engine.output_processor.add_request(core_request, None, None, 0)


# What worker_runtime and prefill_worker touch.


def token_ids(request: Any) -> list[int]:
    """All that is known of a request's prompt and output; the request's own list."""
    tokens: list[int] = request._all_token_ids
    return tokens


def is_ready(scheduler: Any, request: Any) -> bool:
    """Whether nothing that vLLM has it wait for is still missing; what has come is taken note of."""
    return bool(scheduler._handle_blocked_waiting_request(request))


def enqueue(scheduler: Any, request: Any) -> None:
    """Into the queue that its status and its blocks belong to."""
    scheduler._enqueue_waiting_request(request)


def preempt(scheduler: Any, request: Any, now_s: float, *, drop_stale_output: bool) -> None:
    """A request that was running and has been taken out of `running`: frees its blocks, queues it again."""
    scheduler._preempt_request(request, now_s, drop_stale_output=drop_stale_output)


def may_free_blocks(scheduler: Any, request: Any) -> bool:
    """Whether no step in flight and no connector may still write into the blocks of a request."""
    return bool(scheduler._request_blocks_can_be_freed(request))


def free_blocks(scheduler: Any, request: Any) -> None:
    """All that a request holds, as soon as nothing may write into them any more."""
    scheduler._free_request_blocks(request)
