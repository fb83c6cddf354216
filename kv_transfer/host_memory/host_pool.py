"""Host memory for KV blocks of one worker, taken once at the start, and copies between it and the device."""

from collections.abc import Sequence

import psutil
import torch

from cluster_core.errors import StartError
from kv_transfer.host_memory.swap_ledger import SwapCopies


class HostPool:
    """Host memory for `slots` blocks, and the copies between it and the device.

    device_tensors: int8, at least one, each of shape (device blocks, bytes of one block); the pool has as many bytes
    per slot. Raises StartError when they cannot be had.
    """

    def __init__(self, device_tensors: Sequence[torch.Tensor], slots: int) -> None:
        self._device = list(device_tensors)
        self.device = self._device[0].device
        wanted_gib = slots * sum(each.shape[1] for each in self._device) / 2**30
        available_gib = psutil.virtual_memory().available / 2**30
        if wanted_gib > available_gib:
            raise StartError(
                f"tiers.host_gib: {wanted_gib:.2f} GiB of host memory are wanted, {available_gib:.2f} GiB are there"
            )
        try:
            self._host = [
                torch.empty((slots, each.shape[1]), dtype=each.dtype, pin_memory=each.is_cuda) for each in self._device
            ]
            for each in self._host:
                # The pages are there before a copy needs them.
                each.zero_()
        except (RuntimeError, MemoryError) as error:
            raise StartError(
                f"tiers.host_gib: {slots} blocks of host memory, {wanted_gib:.2f} GiB, cannot be had: {error}"
            ) from error

    def copy_out(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Device blocks to host slots."""
        for device, host in zip(self._device, self._host, strict=True):
            _copy_rows(device, blocks, host, slots)

    def copy_in(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        """Host slots to device blocks."""
        for device, host in zip(self._device, self._host, strict=True):
            _copy_rows(host, slots, device, blocks)

    def carry_out(self, copies: SwapCopies) -> None:
        if copies.out:
            blocks, slots = zip(*copies.out, strict=True)
            self.copy_out(blocks, slots)
        if copies.back:
            blocks, slots = zip(*copies.back, strict=True)
            self.copy_in(slots, blocks)


def _copy_rows(source: torch.Tensor, source_rows: Sequence[int], target: torch.Tensor, rows: Sequence[int]) -> None:
    if source.is_cuda or target.is_cuda:
        # One gather, one transfer, one scatter.
        gathered = source[torch.tensor(source_rows, device=source.device)].to(target.device)
        target[torch.tensor(rows, device=target.device)] = gathered
        return
    # In memory, indexing would copy element by element.
    for source_row, row in zip(source_rows, rows, strict=True):
        target[row].copy_(source[source_row])
