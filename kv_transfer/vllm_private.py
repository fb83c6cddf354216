"""Every private field of vLLM that Rachis touches, and nothing else.

vLLM's plug-in points do most of what is needed; what they leave out is reached here, for the one version the lock
files pin. `tests/integration/test_vllm_private.py` fails loudly on another version or a renamed field.
"""

import time
from typing import Any

SUPPORTED_VLLM = "0.32.0"


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
    """(running, waiting) requests; those that wait for remote KV count as waiting."""
    scheduler = scheduler_of(engine)
    return len(scheduler.running), len(scheduler.waiting) + len(scheduler.kv_holding_waiting)


def leased_request_ids(engine: Any) -> set[str]:
    """Finished requests that the scheduler keeps because their blocks are leased or still being received."""
    return {name for name, request in scheduler_of(engine).requests.items() if request.is_finished()}


def expire_lease(connector: Any, request_id: str) -> None:
    """Ends a lease now: the worker side reaps it with its next step, as it would at the lease's own end."""
    connector.connector_scheduler._reqs_need_send[request_id] = time.perf_counter()


def stop_lease_renewal(connector: Any, request_id: str) -> None:
    """The decode side stops renewing the lease of a request that it will not pull."""
    connector.connector_scheduler._stop_heartbeat(request_id)


def bytes_per_block(kv_cache_config: Any) -> int:
    """Device bytes of one block over all layers."""
    return sum(tensor.size for tensor in kv_cache_config.kv_cache_tensors) // kv_cache_config.num_blocks
