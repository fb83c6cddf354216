"""How blocks of KV are named, and where their KV may lie."""

from enum import IntEnum

# vLLM's hash of a block (bytes), or the id of a block in a trace.
BlockHash = bytes | int


class Tier(IntEnum):
    """Where a block's KV lies."""

    DEVICE = 0
    HOST = 1
