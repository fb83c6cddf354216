"""How long a peer may take nothing of its answer."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
from uvicorn import Config
from uvicorn.server import ServerState

from control_plane.gateway.bounded_peer import SEND_TIMEOUT_S, BoundedPeerProtocol


class Timer:
    def __init__(self, delay_s: float, call: Callable[..., None], *arguments: Any) -> None:
        self.delay_s = delay_s
        self.call = partial(call, *arguments)
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class Loop:
    def __init__(self) -> None:
        self.timers: list[Timer] = []

    def call_later(self, delay_s: float, call: Callable[..., None], *arguments: Any) -> Timer:
        self.timers.append(Timer(delay_s, call, *arguments))
        return self.timers[-1]


class Transport:
    def __init__(self) -> None:
        self.is_aborted = False
        self.left = 1 << 24

    def get_write_buffer_size(self) -> int:
        return self.left

    def abort(self) -> None:
        self.is_aborted = True

    def get_extra_info(self, name: str) -> None:
        return None


async def _app(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("nothing is asked")


@pytest.fixture
def made() -> tuple[BoundedPeerProtocol, Loop, Transport]:
    loop, transport = Loop(), Transport()
    config = Config(_app, lifespan="off", log_config=None)
    protocol = BoundedPeerProtocol(config, ServerState(), {}, cast(Any, loop))
    protocol.connection_made(cast(Any, transport))
    return protocol, loop, transport


def test_a_peer_that_takes_nothing_is_given_up_after_a_minute(
    made: tuple[BoundedPeerProtocol, Loop, Transport],
) -> None:
    protocol, loop, transport = made
    protocol.pause_writing()
    (timer,) = loop.timers
    assert (timer.delay_s, timer.is_cancelled) == (SEND_TIMEOUT_S, False)
    timer.call()
    assert transport.is_aborted


def test_a_slow_peer_has_a_minute_for_each_piece_of_what_was_written_at_once(
    made: tuple[BoundedPeerProtocol, Loop, Transport],
) -> None:
    protocol, loop, transport = made
    protocol.pause_writing()
    for _ in range(5):
        transport.left -= 1000
        loop.timers[-1].call()
        assert not transport.is_aborted
    loop.timers[-1].call()
    assert transport.is_aborted
    assert [timer.delay_s for timer in loop.timers] == [SEND_TIMEOUT_S] * 6


@pytest.mark.parametrize("ends", [lambda peer: peer.resume_writing(), lambda peer: peer.connection_lost(OSError())])
def test_one_that_takes_something_or_leaves_is_not(
    made: tuple[BoundedPeerProtocol, Loop, Transport], ends: Callable[[BoundedPeerProtocol], None]
) -> None:
    protocol, loop, _ = made
    for number in range(1, 3):
        protocol.pause_writing()
        ends(protocol)
        assert [timer.is_cancelled for timer in loop.timers] == [True] * number
