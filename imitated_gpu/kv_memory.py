"""Device memory for KV that is not there: addresses without memory behind them, as long as nobody touches them."""

import mmap
from typing import Any

import torch

from cluster_core.errors import StartError

# Linux's own; Python has no name for it.
_MAP_NORESERVE = 0x4000


def blocks_without_memory(blocks: int, block_bytes: int) -> Any:
    """A tensor of shape (blocks, bytes of one block). Raises StartError where the system refuses the addresses."""
    size = blocks * block_bytes
    try:
        space = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    except OSError as error:
        raise StartError(
            f"the system gives no {size / 2**30:.0f} GiB of addresses for imitated KV ({error.strerror}): allow "
            "overcommit (vm.overcommit_memory 0 or 1), or lower engine.kv_blocks"
        ) from None
    return torch.frombuffer(space, dtype=torch.int8).view(blocks, block_bytes)
