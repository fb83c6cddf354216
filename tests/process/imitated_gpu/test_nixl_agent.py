"""Agents that stand for NIXL's: a read takes its modelled time, and the other side hears of it once it is over."""

import contextlib
import time
from collections.abc import Iterator

import numpy as np
import pytest

from imitated_gpu.link import SharedLink
from imitated_gpu.nixl_agent import ImitatedNixlAgent

BLOCK_BYTES = 1000
# A block takes a second.
RATE = 1000.0
TIMEOUT_S = 30.0


class Clock:
    def __init__(self) -> None:
        self.s = 100.0

    def __call__(self) -> float:
        return self.s


class Pair:
    """A reader that knows the other, each with ten blocks."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.reader, self.owner = (
            ImitatedNixlAgent(name, None, link=SharedLink(RATE, 0.5), host="127.0.0.1", ports=None, now_s=self.clock)
            for name in ("reader", "owner")
        )
        self.name = self.reader.add_remote_agent(self.owner.get_agent_metadata())
        rows = np.array([(number * BLOCK_BYTES, BLOCK_BYTES, 0) for number in range(10)], dtype=np.uint64)
        self.here = self.reader.prep_xfer_dlist("NIXL_INIT_AGENT", self.reader.get_xfer_descs(rows, "DRAM"))
        self.there = self.reader.prep_xfer_dlist(self.name, self.reader.get_xfer_descs(rows, "DRAM"))

    def read(self, notice: bytes) -> int:
        handle = self.reader.make_prepped_xfer("READ", self.here, [0, 1], self.there, [7, 8], notif_msg=notice)
        self.reader.transfer(handle)
        return handle

    def state(self, handle: int, wanted: str) -> bool:
        """Waits for the connection between the two, not for the link."""
        until_s = time.monotonic() + TIMEOUT_S
        while self.reader.check_xfer_state(handle) != wanted and time.monotonic() < until_s:
            time.sleep(0.001)
        return self.reader.check_xfer_state(handle) == wanted

    def heard(self) -> list[bytes]:
        """The next messages of the owner."""
        until_s = time.monotonic() + TIMEOUT_S
        while time.monotonic() < until_s:
            found = [each for notices in self.owner.get_new_notifs().values() for each in notices]
            if found:
                return found
        raise AssertionError("nothing was heard")


@pytest.fixture
def pair() -> Iterator[Pair]:
    with contextlib.ExitStack() as stack:
        pair = Pair()
        stack.callback(pair.reader.close)
        stack.callback(pair.owner.close)
        yield pair


def test_a_read_is_over_after_its_modelled_time_and_its_owner_hears_of_it_then(pair: Pair) -> None:
    handle = pair.read(b"lease:1")
    pair.reader.send_notif(pair.name, b"connected")
    assert pair.heard() == [b"connected"]
    pair.clock.s += 2.4
    assert pair.reader.check_xfer_state(handle) == "PROC"
    assert pair.owner.get_new_notifs() == {}
    pair.clock.s += 0.2
    assert pair.state(handle, "DONE")
    told = pair.reader.get_xfer_telemetry(handle)
    assert (told.totalBytes, told.descCount) == (2000, 2)
    assert told.xferDuration == pytest.approx(2.6e6)
    pair.reader.release_xfer_handle(handle)
    assert pair.heard() == [b"lease:1"]


def test_a_message_without_a_read_comes_at_once(pair: Pair) -> None:
    pair.reader.send_notif(pair.name, b"HB:one,two")
    assert pair.heard() == [b"HB:one,two"]


def test_a_read_that_is_released_tells_nobody_and_leaves_the_link_to_others(pair: Pair) -> None:
    given_up, other = pair.read(b"given up"), pair.read(b"other")
    pair.reader.release_xfer_handle(given_up)
    pair.clock.s += 2.6
    assert pair.state(other, "DONE")
    assert pair.heard() == [b"other"]


def test_a_read_from_an_agent_that_goes_meanwhile_fails_and_nothing_is_known_of_it_any_more(pair: Pair) -> None:
    handle = pair.read(b"lease:1")
    pair.reader.send_notif(pair.name, b"connected")
    assert pair.heard() == [b"connected"]
    pair.owner.close()
    assert pair.state(handle, "ERR")
    assert not pair.reader.check_remote_metadata(pair.name)
    pair.reader.remove_remote_agent(pair.name)
    with pytest.raises(KeyError):
        pair.reader.send_notif(pair.name, b"lease:1")


def test_a_read_from_an_agent_that_cannot_be_reached_is_not_done_whatever_time_passes(pair: Pair) -> None:
    pair.owner.close()
    handle = pair.read(b"lease:1")
    pair.clock.s += 1000
    assert pair.reader.check_xfer_state(handle) == "PROC"
