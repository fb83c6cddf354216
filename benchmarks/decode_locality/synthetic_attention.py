"""Attention of decode steps over KV that was never computed, timed on a GPU without vLLM.

A step is one call of `PagedDecode` for each layer of a model's shape, each over memory of its own, as in a real step:
what one layer leaves in the L2 cache is of no use to the next. Nothing but attention is timed: no projections, no
sampling, so that a model's own costs have to be added to `base_ms` and `per_request_ms`. Blocks lie at random places.
The launches are captured as a CUDA graph, because otherwise those of a small batch would take longer than it does, and
each replay is timed by CUDA events.

It has not run on a GPU so far. On a CPU, in Triton's interpreter, the kernels' results and the block tables are tested;
allocation, the choice of splits, the graph and the events are not.
"""

import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.decode_locality.batches import BatchShape
from cluster_core.errors import UnavailableError

TIMED_STEPS = 16
_COLD_STEPS = 3
_BLOCK_TOKENS = 32
# Of the free memory; the rest is for queries, parts and the graph.
_MEMORY_SHARE = 0.8
_MOST_SPLITS = 64


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The attention of a model."""

    model: str
    layers: int
    query_heads: int
    kv_heads: int
    head_size: int
    # torch's name of it.
    dtype: str

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all layers."""
        number_bytes: int = getattr(torch, self.dtype).itemsize
        return 2 * self.layers * self.kv_heads * self.head_size * number_bytes


LLAMA_3_1_8B = AttentionShape("Llama-3.1-8B", 32, 32, 8, 128, "bfloat16")
# Milliseconds of each of so many runs of a step, after some that do not count.
TimeSteps = Callable[[Callable[[], None], int], list[float]]


class TritonDecode:
    """See `decode_locality.Decoder`. Raises UnavailableError where there is no CUDA device or no Triton."""

    name = "triton"
    block_size_tokens = _BLOCK_TOKENS

    def __init__(self, model: AttentionShape, seed: int) -> None:
        if not torch.cuda.is_available():
            raise UnavailableError("there is no CUDA device here")
        free_bytes, _ = torch.cuda.mem_get_info()
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        self._capacity_tokens = int(free_bytes * _MEMORY_SHARE) // model.kv_bytes_per_token
        self._attention = SyntheticAttention(model, processors, seed, "cuda", time_graph)
        self._model = model

    def facts(self) -> dict[str, Any]:
        return {
            "model": self._model.model,
            "dtype": self._model.dtype,
            "block_size_tokens": self.block_size_tokens,
            "kv_bytes_per_token": self._model.kv_bytes_per_token,
            "timed_steps": TIMED_STEPS,
            "attention_only": True,
        }

    def holds(self, shape: BatchShape) -> bool:
        return blocks_of(shape) * self.block_size_tokens <= self._capacity_tokens

    def prepare(self, shapes: Iterable[BatchShape]) -> None:
        self._attention.allocate(max(map(blocks_of, shapes)))

    def visit(self, shape: BatchShape) -> list[float]:
        return self._attention.visit(shape)

    def stop(self) -> None:
        self._attention.release()


def blocks_of(shape: BatchShape) -> int:
    """Blocks that a batch takes at most: each request's last one may be partial."""
    return shape.reads(_BLOCK_TOKENS).distinct_tokens // _BLOCK_TOKENS + shape.batch


class SyntheticAttention:
    """Random KV of a model's shape and the attention of a batch over it. processors: those of the device, which are
    to have two programs each."""

    def __init__(self, model: AttentionShape, processors: int, seed: int, device: str, time_steps: TimeSteps) -> None:
        try:
            from benchmarks.decode_locality.paged_decode_triton import PagedDecode
        except ImportError:
            raise UnavailableError("neither vLLM nor Triton is installed here") from None
        self._kernel = PagedDecode
        self._model = model
        self._processors = processors
        self._rng = random.Random(seed)
        self._device = device
        self._time_steps = time_steps
        self.layers: list[tuple[Any, Any]] = []

    def allocate(self, blocks: int) -> None:
        shape = (blocks, self._model.kv_heads, _BLOCK_TOKENS, self._model.head_size)
        self.layers = [(self._normal(*shape), self._normal(*shape)) for _ in range(self._model.layers)]

    def release(self) -> None:
        self.layers = []

    def batch(self, shape: BatchShape) -> tuple[Any, Any, Any]:
        """(query, block table, lengths) of a batch; its blocks lie at random places."""
        blocks = self.layers[0][0].shape[0]
        tables = shape.block_tables(_BLOCK_TOKENS, iter(self._rng.sample(range(blocks), blocks)))
        widest = max(map(len, tables))
        table = torch.tensor([each + [0] * (widest - len(each)) for each in tables], dtype=torch.int32)
        lengths = torch.tensor(shape.lengths(), dtype=torch.int32)
        query = self._normal(shape.batch, self._model.query_heads, self._model.head_size)
        return query, table.to(self._device), lengths.to(self._device)

    def step(self, query: Any, table: Any, lengths: Any, results: Any) -> Callable[[], None]:
        """What attends once in every layer, and leaves each layer's result in `results`."""
        model, batch = self._model, len(lengths)
        splits = splits_of(self._processors, batch * model.kv_heads)
        attend = self._kernel(batch, model.query_heads, model.kv_heads, model.head_size, splits, self._device)

        def run() -> None:
            for (keys, values), result in zip(self.layers, results, strict=True):
                attend(query, keys, values, table, lengths, result)

        return run

    def visit(self, shape: BatchShape) -> list[float]:
        query, table, lengths = self.batch(shape)
        results = [torch.empty_like(query) for _ in self.layers]
        return self._time_steps(self.step(query, table, lengths, results), TIMED_STEPS)

    def _normal(self, *shape: int) -> Any:
        return torch.randn(*shape, dtype=getattr(torch, self._model.dtype), device=self._device)


def splits_of(processors: int, programs: int) -> int:
    """The power of two that gives each processor about two programs."""
    wanted = -(-2 * processors // programs)
    return min(_MOST_SPLITS, 1 << max(0, wanted - 1).bit_length())


def time_graph(step: Callable[[], None], steps: int) -> list[float]:
    """Replays of the step as one CUDA graph, each between two events."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        # Compiles the kernels: nothing may be compiled while a graph is captured.
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(_COLD_STEPS):
        graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return [float(before.elapsed_time(after)) for before, after in itertools.pairwise(events)]
