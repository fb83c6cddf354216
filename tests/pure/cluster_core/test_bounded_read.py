"""Reading from somebody who may send slowly, or never end."""

from collections.abc import Callable
from io import BytesIO

import pytest

from cluster_core.bounded_read import read_within


def dripping(now_s: list[float], every_s: float) -> Callable[[int], bytes]:
    """A byte each so many seconds, without end."""

    def read1(most_bytes: int) -> bytes:
        now_s[0] += every_s
        return b"x"

    return read1


@pytest.mark.parametrize(("most_bytes", "read"), [(10, b"abc"), (3, b"abc"), (2, b"ab"), (0, b"")])
def test_it_ends_with_the_stream_or_with_what_is_wanted(most_bytes: int, read: bytes) -> None:
    assert read_within(BytesIO(b"abc").read1, most_bytes, 5.0, lambda: 0.0) == read


def test_what_comes_in_pieces_is_whole() -> None:
    pieces = iter([b"ab", b"c", b""])
    assert read_within(lambda most_bytes: next(pieces), 10, 5.0, lambda: 0.0) == b"abc"


def test_who_sends_a_byte_now_and_then_is_not_read_for_ever() -> None:
    now_s = [100.0]
    with pytest.raises(TimeoutError, match="after 5 s"):
        read_within(dripping(now_s, 2.0), 1_000_000, 5.0, lambda: now_s[0])
    assert now_s[0] == 106.0


def test_who_is_slow_and_in_time_is_read() -> None:
    now_s = [100.0]
    assert read_within(dripping(now_s, 1.0), 5, 5.0, lambda: now_s[0]) == b"xxxxx"
