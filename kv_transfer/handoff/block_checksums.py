"""Checksums of blocks, to compare what was pulled with what was sent (`content_check`).

A block's checksum is the sum of its 8-byte words, each times an odd weight of its place, modulo 2^64. It is taken on
the device that holds the block, and finds what was lost, mixed up or overwritten; it is no protection against forgery.
"""

from collections.abc import Sequence

import torch

_WORD = 8
_MIX = 0x2545F4914F6CDD1D
_STEP = 0x1E3779B97F4A7C15


class BlockChecksums:
    """Of one worker's device memory. views: int8 tensors of shape (blocks, bytes of one block), one for each layer's
    memory. at_once_bytes: of blocks that are multiplied at once."""

    def __init__(self, views: Sequence[torch.Tensor], at_once_bytes: int = 1 << 24) -> None:
        self._views = views
        self._at_once_bytes = at_once_bytes
        self._weights = {view.shape[1]: _weights(-(-view.shape[1] // _WORD), view.device) for view in views}

    def of(self, block_ids: Sequence[int]) -> list[int]:
        """One signed 64-bit number for each block."""
        sums: list[int] = []
        widest = max((view.shape[1] for view in self._views), default=1)
        step = max(1, self._at_once_bytes // widest)
        for first in range(0, len(block_ids), step):
            sums += self._of_some(block_ids[first : first + step])
        return sums

    def _of_some(self, block_ids: Sequence[int]) -> list[int]:
        total: torch.Tensor | None = None
        for view in self._views:
            rows = view[torch.tensor(block_ids, device=view.device)]
            if rows.shape[1] % _WORD:
                rows = torch.nn.functional.pad(rows, (0, _WORD - rows.shape[1] % _WORD))
            layer = (rows.view(torch.int64) * self._weights[view.shape[1]]).sum(dim=1)
            total = layer if total is None else total * _MIX + layer.to(total.device)
        return total.tolist() if total is not None else []


def _weights(words: int, device: torch.device) -> torch.Tensor:
    places = torch.arange(1, words + 1, dtype=torch.int64, device=device) * _STEP
    return (places ^ (places >> 29)) * _MIX | 1
