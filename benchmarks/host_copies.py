"""How fast KV blocks are copied between device and host memory, beside one `memmove` of as many bytes.

Blocks are drawn at random on both sides, so that none follow each other: the worst case of a cache that is full. On a
machine without a GPU the device is memory too. Sides take turns, round by round:

    out, back    `HostPool`, as the tiers use it
    rows         a tensor operation for each row, which `HostPool` did before
    memmove      the same bytes in one piece
"""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch

from cluster_core.clock import monotonic_s
from kv_transfer.host_memory.host_pool import HostPool

# Bytes of a block in one layer, and layers: small models, and an 8B model with blocks of 16 and 64 tokens.
SHAPES = ((4096, 4), (16384, 16), (65536, 32), (262144, 32))
# The shape whose ratios are reported: Llama 3.1 8B, blocks of 16 tokens.
REPORTED = (65536, 32)
_SIDES = ("out", "back", "rows", "memmove")


@dataclass(frozen=True, slots=True)
class Speeds:
    """GB/s, medians of the rounds, by side."""

    block_bytes: int
    layers: int
    blocks: int
    gb_per_s: Mapping[str, float]

    def ratio(self, side: str, to: str = "memmove") -> float:
        return round(self.gb_per_s[side] / self.gb_per_s[to], 3)

    def table(self) -> dict[str, Any]:
        shape = {"block_bytes": self.block_bytes, "layers": self.layers, "blocks": self.blocks}
        return {**shape, "gb_per_s": {side: round(speed, 2) for side, speed in self.gb_per_s.items()}}


def measure(copied_bytes: int, rounds: int, say: Callable[[str], None]) -> list[Speeds]:
    """copied_bytes: in each round, about."""
    found = []
    for block_bytes, layers in SHAPES:
        blocks = max(2, copied_bytes // (block_bytes * layers))
        say(f"{blocks} blocks of {layers} x {block_bytes} bytes")
        found.append(_measured(block_bytes, layers, blocks, rounds))
    return found


def table(found: Sequence[Speeds]) -> dict[str, Any]:
    (reported,) = (each for each in found if (each.block_bytes, each.layers) == REPORTED)
    return {
        "out_of_memcpy": reported.ratio("out"),
        "back_of_memcpy": reported.ratio("back"),
        "out_of_rows": reported.ratio("out", "rows"),
        "shapes": [each.table() for each in found],
    }


def _measured(block_bytes: int, layers: int, blocks: int, rounds: int) -> Speeds:
    rng = np.random.default_rng(0)
    device = [torch.ones((2 * blocks, block_bytes), dtype=torch.int8) for _ in range(layers)]
    pool = HostPool(device, 2 * blocks)
    here, there = torch.ones(blocks * block_bytes * layers, dtype=torch.int8), None
    there = torch.zeros_like(here)
    seconds: dict[str, list[float]] = {side: [] for side in _SIDES}
    for _ in range(rounds):
        froms, tos = (rng.permutation(2 * blocks)[:blocks].tolist() for _ in range(2))
        copies: Mapping[str, Callable[[], object]] = {
            "out": lambda froms=froms, tos=tos: pool.copy_out(froms, tos),  # type: ignore[misc]
            "back": lambda froms=froms, tos=tos: pool.copy_in(tos, froms),  # type: ignore[misc]
            "rows": lambda froms=froms, tos=tos: _copy_rows(device, pool, froms, tos),  # type: ignore[misc]
            "memmove": lambda: ctypes.memmove(there.data_ptr(), here.data_ptr(), here.nbytes),
        }
        for side in rng.permutation(_SIDES):
            began_s = monotonic_s()
            copies[side]()
            seconds[side].append(monotonic_s() - began_s)
    speeds = {side: here.nbytes / 1e9 / median(each) for side, each in seconds.items()}
    return Speeds(block_bytes, layers, blocks, speeds)


def _copy_rows(device: Sequence[torch.Tensor], pool: HostPool, froms: Sequence[int], tos: Sequence[int]) -> None:
    for source, target in zip(device, pool.host, strict=True):
        for block, slot in zip(froms, tos, strict=True):
            target[slot].copy_(source[block])
