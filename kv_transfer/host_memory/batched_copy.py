"""Copies of many KV blocks as one batch of descriptors: (source address, target address, bytes).

A block lies in one row of each layer's memory, so that a few hundred blocks of a model are ten thousand rows. They are
copied by a primitive that takes all of them at once: `memmove_all` between host memories, and one asynchronous batch of
the driver where one side is a GPU. Rows that follow each other on both sides are one descriptor.
"""

import ctypes
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

# From this mean size on several threads are faster than one.
_LARGE_BYTES = 32 << 10
# More of them find a memory that is busy.
_THREADS = min(4, os.cpu_count() or 1)

Addresses: TypeAlias = npt.NDArray[np.int64]
# Copies all of them; on a GPU, in the order of the current stream.
CopyAll: TypeAlias = Callable[["Descriptors"], None]


@dataclass(frozen=True, slots=True, eq=False)
class Descriptors:
    """One entry for each copy, the same in all three."""

    sources: Addresses
    targets: Addresses
    sizes: Addresses

    def part(self, which: slice) -> "Descriptors":
        return Descriptors(self.sources[which], self.targets[which], self.sizes[which])


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Where the rows of several memories lie, one memory for each layer. All have as many rows.

    bases: addresses, by memory. strides: bytes from a row to the next. row_bytes: of one row.
    """

    count: int
    bases: Addresses
    strides: Addresses
    row_bytes: Addresses

    @classmethod
    def of(cls, memories: Sequence[torch.Tensor]) -> "Rows":
        """memories: of shape (rows, bytes of one), one byte an element; rows are not cut up."""
        (count,) = {len(each) for each in memories}
        assert all(each.element_size() == 1 and each.stride(1) == 1 for each in memories)
        return cls(
            count,
            np.array([each.data_ptr() for each in memories], dtype=np.int64),
            np.array([each.stride(0) for each in memories], dtype=np.int64),
            np.array([each.shape[1] for each in memories], dtype=np.int64),
        )


def descriptors(source: Rows, source_rows: Sequence[int], target: Rows, target_rows: Sequence[int]) -> Descriptors:
    """Of copies of these rows of each memory to those, pair by pair. Raises IndexError for a row that is not there."""
    froms, tos = _checked(source_rows, source.count), _checked(target_rows, target.count)
    order = np.argsort(froms, kind="stable")
    froms, tos = froms[order], tos[order]
    is_dense = source.strides == source.row_bytes
    is_dense &= target.strides == target.row_bytes
    # A run goes on where the next pair follows on both sides.
    begins = np.ones(len(froms), dtype=bool)
    if is_dense.all() and len(froms):
        begins[1:] = (np.diff(froms) != 1) | (np.diff(tos) != 1)
    first = np.flatnonzero(begins)
    lengths = np.diff(np.append(first, len(froms)))
    return Descriptors(
        (source.bases[:, None] + source.strides[:, None] * froms[first]).ravel(),
        (target.bases[:, None] + target.strides[:, None] * tos[first]).ravel(),
        (source.row_bytes[:, None] * lengths).ravel(),
    )


def memmove_all(batch: Descriptors) -> None:
    """Between memories of this process. Large pieces are moved by a few threads."""
    if not len(batch.sizes):
        return
    if batch.sizes.mean() < _LARGE_BYTES:
        _move(batch)
        return
    cuts = np.linspace(0, len(batch.sizes), _THREADS + 1).astype(int)
    parts = [slice(begin, end) for begin, end in pairwise(cuts)]
    moving = [_movers().submit(_move, batch.part(part)) for part in parts]
    # Of none that has failed are the others still under way.
    wait(moving)
    for each in moving:
        each.result()


def _move(batch: Descriptors) -> None:
    """It gives the interpreter's lock away for each piece."""
    move = ctypes.memmove
    for source, target, size in zip(batch.sources.tolist(), batch.targets.tolist(), batch.sizes.tolist(), strict=True):
        move(target, source, size)


@cache
def _movers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_THREADS, thread_name_prefix="rachis-memmove")


def driver_copies_all(batch: Descriptors) -> None:
    """Between a GPU and pinned memory: one call of the driver for all of them, in the order of the current stream."""
    from vllm import _custom_ops

    arrays = (batch.sources, batch.targets, batch.sizes)
    _custom_ops.swap_blocks_batch(*(torch.from_numpy(each) for each in arrays))


def copies_of(device: torch.device) -> CopyAll:
    """The primitive between host memory and this device."""
    return memmove_all if device.type == "cpu" else driver_copies_all


def _checked(rows: Sequence[int], count: int) -> Addresses:
    checked = np.asarray(rows, dtype=np.int64)
    if len(checked) and not (checked.min() >= 0 and checked.max() < count):
        raise IndexError(f"rows {checked.min()} to {checked.max()} of memory with {count}")
    return checked
