"""A connection from handshake to end: what is answered while something runs, and who is told when it is over."""

import asyncio
from collections.abc import AsyncIterator

import pytest_asyncio

from tests.fakes.responses_socket import APPEND, CREATE, Play


@pytest_asyncio.fixture
async def play() -> AsyncIterator[Play]:
    made = Play()
    yield made
    await made.leave()


async def test_a_mistake_is_answered_and_the_connection_goes_on(play: Play) -> None:
    play.send("nonsense", b"bytes", '{"type": "response.append", "text": "bad"}', APPEND)
    assert [await play.said() for _ in range(4)] == ["invalid_json", "invalid_frame", "c", {"type": "Append"}]


async def test_events_that_are_short_are_answered_one_after_the_other(play: Play) -> None:
    play.send(APPEND, APPEND, CREATE)
    assert [await play.said() for _ in range(3)] == [{"type": "Append"}, {"type": "Append"}, {"type": "begun"}]


async def test_while_a_response_is_generated_everything_else_is_refused(play: Play) -> None:
    play.send(CREATE)
    await play.said()
    play.send(CREATE, APPEND, "nonsense")
    refused = [await play.said() for _ in range(3)]
    assert refused == ["response_already_in_flight", "response_already_in_flight", "invalid_json"]
    play.talk.goes_on.set()
    assert await play.said() == {"type": "Create"}
    play.send(APPEND)
    assert await play.said() == {"type": "Append"}


async def test_a_client_that_leaves_cancels_what_is_generated_for_it() -> None:
    play = Play()
    play.send(CREATE)
    await play.said()
    await play.leave()
    assert play.talk.was_cancelled


async def test_a_client_that_takes_nothing_any_more_is_gone() -> None:
    play = Play()
    play.socket.is_gone = True
    play.send(CREATE)
    await asyncio.wait_for(play.run, 10)
    assert play.talk.is_closed
