"""What lies between a call on the loop and a browser that may not read."""

import queue
from collections.abc import AsyncGenerator

import pytest
from google.protobuf.message import Message
from rachis.v1 import admin_pb2 as admin

from control_plane.console.admin_calls import Refused
from control_plane.console.streams import MOST_BEHIND, Stream


async def told(count: int, end: Refused | None = None) -> AsyncGenerator[Message, None]:
    for number in range(count):
        yield admin.GetOverviewResponse(unlisted_alerts=number)
    if end is not None:
        raise end


async def test_what_is_told_comes_in_order_and_then_the_end() -> None:
    stream = Stream()
    await stream.pump(told(3))
    messages = [stream.next(0.0) for _ in range(3)]
    assert [message.unlisted_alerts for message in messages if isinstance(message, admin.GetOverviewResponse)] == [
        0,
        1,
        2,
    ]
    assert stream.next(0.0) is None and not stream.is_slow


async def test_why_there_is_no_more_comes_last() -> None:
    stream = Stream()
    await stream.pump(told(1, Refused("UNAVAILABLE", "the router stops")))
    stream.next(0.0)
    why = stream.next(0.0)
    assert isinstance(why, Refused) and why.status == "UNAVAILABLE"
    with pytest.raises(queue.Empty):
        stream.next(0.0)


@pytest.mark.parametrize("count", [MOST_BEHIND + 1, 1000])
async def test_a_browser_that_is_too_far_behind_is_slow_and_the_call_ends(count: int) -> None:
    stream, answers = Stream(), told(count)
    await stream.pump(answers)
    assert stream.is_slow
    with pytest.raises(StopAsyncIteration):
        await anext(answers)
