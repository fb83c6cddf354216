"""Reads from somebody else's connection for a bounded time.

A socket's timeout is for each piece that comes: who sends a byte now and then would be read for ever.
"""

from collections.abc import Callable

from cluster_core.clock import monotonic_s


def read_within(
    read1: Callable[[int], bytes], most_bytes: int, timeout_s: float, now_s: Callable[[], float] = monotonic_s
) -> bytes:
    """What comes until the end, and `most_bytes` of it at most. Raises TimeoutError where it has not ended in time.

    read1: of a binary stream; waits for one piece, by the stream's own timeout at most.
    """
    whole, until_s = bytearray(), now_s() + timeout_s
    while len(whole) < most_bytes and (piece := read1(most_bytes - len(whole))):
        whole += piece
        if now_s() > until_s:
            raise TimeoutError(f"it has not ended after {timeout_s:g} s")
    return bytes(whole)
