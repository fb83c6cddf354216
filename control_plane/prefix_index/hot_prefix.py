"""A prefix that requests share, as the index tells of it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HotPrefix:
    """A prefix that requests share."""

    key: int
    chunks: int
    # Requests a second, decayed.
    rate: float
    # Workers by tier, of its last chunk.
    device: tuple[str, ...]
    host: tuple[str, ...]
    # Of the longest other one of these that it goes on from.
    parent: int | None = None
