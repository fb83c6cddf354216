"""What vLLM's model runners do besides: seeded prompts are prefilled in chunks, rows that share a prefix lie together.

Mixins over runners that vLLM has made. The private methods that they override are in the list of
`kv_transfer.vllm_private`, whose tests fail on another version.
"""

from typing import Any

from kv_transfer import batch_order


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


class SharedPrefixOrder:
    """Mixin for vLLM's V1 model runners: requests that share a prefix lie side by side in the batch.

    Only when the batch has changed, and where no attention backend asks for an order of its own.
    """

    orders_rows = True
    _rows_in_order: list[str] | None = None

    def _may_reorder_batch(self, scheduler_output: Any) -> None:
        super()._may_reorder_batch(scheduler_output)  # type: ignore[misc]
        batch: Any = self.input_batch  # type: ignore[attr-defined]
        backend_orders: bool = self.reorder_batch_threshold is not None  # type: ignore[attr-defined]
        if backend_orders or not self.orders_rows or batch.req_ids == self._rows_in_order:
            return
        table = batch.block_table[0]
        rows = batch.num_reqs
        keys = batch_order.shared_keys(table.block_table.np[:rows], table.num_blocks_per_row[:rows].tolist())
        for one, other in batch_order.swaps_to_group(keys):
            batch.swap_states(one, other)
        self._rows_in_order = list(batch.req_ids)


def keep_shared_prefixes_together(model_runner: Any) -> None:
    """Mixes `SharedPrefixOrder` into a model runner that vLLM has made."""
    kind = type(model_runner)
    model_runner.__class__ = type(f"SharedPrefixOrder{kind.__name__}", (SharedPrefixOrder, kind), {})
