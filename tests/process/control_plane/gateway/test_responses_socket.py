"""How long a connection may be silent, and how long it lives."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from tests.fakes.responses_socket import CREATE, Play


async def test_one_that_says_nothing_is_told_and_left() -> None:
    play = Play(idle_timeout_s=0.001)
    assert await play.said() == "websocket_idle_timeout"
    assert await play.said() == (1000, "websocket_idle_timeout")
    await asyncio.wait_for(play.run, 10)


async def test_a_connection_that_has_lived_for_its_time_ends_whatever_it_does() -> None:
    play = Play(lifetime_s=0.001)
    play.send(CREATE)
    ends = [each async for each in _all_said(play)]
    assert ends[-2:] == ["websocket_connection_limit_reached", (1000, "websocket_connection_limit_reached")]
    assert play.talk.is_closed
    assert play.talk.was_cancelled or not play.talk.begun.is_set()


async def _all_said(play: Play) -> AsyncIterator[Any]:
    await asyncio.wait_for(play.run, 10)
    while not play.socket.said.empty():
        yield await play.said()
