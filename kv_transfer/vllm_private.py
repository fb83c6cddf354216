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


class SeededChunkedPrefill:
    """Mixin for vLLM's CPU model runner: a seeded prompt may be prefilled in several chunks.

    A chunk that is not the last is sampled all the same, and the draw is undone by setting the generator's offset
    back, which a CPU generator cannot do: stock vLLM 0.32 dies there. Here the generator's state is restored instead.
    """

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        drawn_for_nothing = self._discarded_generators()
        states = {row: generator.get_state() for row, generator in drawn_for_nothing.items()}
        output = super()._sample(*args, **kwargs)  # type: ignore[misc]
        for row, generator in drawn_for_nothing.items():
            generator.set_state(states[row])
        return output

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        hidden = self._discarded_generators()
        generators = self.input_batch.generators  # type: ignore[attr-defined]
        for row in hidden:
            del generators[row]
        try:
            return super()._bookkeeping_sync(*args, **kwargs)  # type: ignore[misc]
        finally:
            generators.update(hidden)

    def _discarded_generators(self) -> dict[int, Any]:
        batch: Any = self.input_batch  # type: ignore[attr-defined]
        discarded = self.discard_request_mask.np[: batch.num_reqs]  # type: ignore[attr-defined]
        return {row: generator for row, generator in batch.generators.items() if discarded[row]}


def allow_seeded_chunked_prefill(model_runner: Any) -> None:
    """Mixes `SeededChunkedPrefill` into a CPU model runner that vLLM has made."""
    kind = type(model_runner)
    model_runner.__class__ = type(f"SeededChunkedPrefill{kind.__name__}", (SeededChunkedPrefill, kind), {})
