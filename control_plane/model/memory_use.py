"""Memory of a router that grows with what clients send, by what it is for, and its limits. Pure.

Bytes are estimates from counts of tokens and rows; what they are for is bounded by them, not by the process's size.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """limit: the setting that says `limit_bytes`."""

    what: str
    used_bytes: int
    limit_bytes: int
    limit: str
