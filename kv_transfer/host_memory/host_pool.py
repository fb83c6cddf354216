"""Host memory for KV blocks of one worker, taken once at the start, and copies between it and the device."""

from collections.abc import Sequence

import psutil
import torch

from cluster_core.errors import StartError
from kv_transfer.host_memory.batched_copy import CopyAll, Rows, copies_of, descriptors
from kv_transfer.host_memory.swap_ledger import SwapCopies


class HostPool:
    """Host memory for `slots` blocks, and the copies between it and the device.

    device_tensors: int8, at least one, each of shape (device blocks, bytes of one block); the pool has as many bytes
    per slot. Raises StartError when they cannot be had.
    """

    def __init__(self, device_tensors: Sequence[torch.Tensor], slots: int, copy_all: CopyAll | None = None) -> None:
        """copy_all: the primitive that copies; None: that of the device."""
        # Held as long as their addresses are used.
        self._device = list(device_tensors)
        self.device = self._device[0].device
        self._copy_all = copy_all or copies_of(self.device)
        wanted_gib = slots * sum(each.shape[1] for each in self._device) / 2**30
        available_gib = psutil.virtual_memory().available / 2**30
        if wanted_gib > available_gib:
            raise StartError(
                f"tiers.host_gib: {wanted_gib:.2f} GiB of host memory are wanted, {available_gib:.2f} GiB are there"
            )
        try:
            self.host = [
                torch.empty((slots, each.shape[1]), dtype=each.dtype, pin_memory=each.is_cuda) for each in self._device
            ]
            for each in self.host:
                # The pages are there before a copy needs them.
                each.zero_()
        except (RuntimeError, MemoryError) as error:
            raise StartError(
                f"tiers.host_gib: {slots} blocks of host memory, {wanted_gib:.2f} GiB, cannot be had: {error}"
            ) from error

        self._device_rows, self._host_rows = Rows.of(self._device), Rows.of(self.host)

    def copy_out(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Device blocks to host slots."""
        self._copy_all(descriptors(self._device_rows, blocks, self._host_rows, slots))

    def copy_in(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        """Host slots to device blocks."""
        self._copy_all(descriptors(self._host_rows, slots, self._device_rows, blocks))

    def wait(self) -> None:
        """Until what is enqueued on the stream that computes is done; a CPU does everything at once."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def carry_out(self, copies: SwapCopies) -> None:
        if copies.out:
            blocks, slots = zip(*copies.out, strict=True)
            self.copy_out(blocks, slots)
        if copies.back:
            blocks, slots = zip(*copies.back, strict=True)
            self.copy_in(slots, blocks)
