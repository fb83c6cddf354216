"""A loop over Redis outlives whatever fails, says it once, and ends when it is cancelled."""

import asyncio
import logging
from collections.abc import Iterable

import pytest
import redis

from cluster_wire.redis_loop import LoopWords, RedisLoop

logger = logging.getLogger(__name__)
WORDS = LoopWords(logger, away="away: %s", back="back", defect="a defect")
AWAY = redis.ConnectionError("refused")
DEFECT = ZeroDivisionError("of a test")


class Played:
    """A loop whose tries end as they are told to: with None, or by raising."""

    def __init__(self, *outcomes: Exception | None) -> None:
        self.outcomes = list(outcomes)
        # After each try: whether Redis answered, and whether there was a defect.
        self.flags: list[tuple[bool, bool]] = []
        self.put_right: list[str] = []
        self.loop = RedisLoop(
            self._step,
            self._pause,
            WORDS,
            on_outage=lambda: self._note("outage"),
            on_defect=lambda: self._note("defect"),
            goes_on=lambda: bool(self.outcomes),
        )

    async def _step(self) -> None:
        outcome = self.outcomes.pop(0)
        if outcome is not None:
            raise outcome

    async def _pause(self) -> None:
        self.flags.append((self.loop.connected, self.loop.has_defect))

    async def _note(self, what: str) -> None:
        self.put_right.append(what)


async def said(caplog: pytest.LogCaptureFixture, outcomes: Iterable[Exception | None]) -> list[str]:
    await Played(*outcomes).loop.run()
    return [record.getMessage() for record in caplog.records]


async def test_an_outage_is_said_once_and_once_that_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    assert await said(caplog, [None, AWAY, AWAY, None, None, AWAY]) == ["away: refused", "back", "away: refused"]


async def test_a_defect_is_logged_with_its_traceback_when_it_begins(caplog: pytest.LogCaptureFixture) -> None:
    assert await said(caplog, [DEFECT, DEFECT, None, DEFECT]) == ["a defect", "back", "a defect"]
    assert [record.exc_info is not None for record in caplog.records] == [True, False, True]


async def test_another_defect_is_logged_though_no_try_has_worked_between(caplog: pytest.LogCaptureFixture) -> None:
    other = ValueError("another one")
    assert await said(caplog, [DEFECT, other, other]) == ["a defect", "a defect"]
    assert [record.exc_info and record.exc_info[1] for record in caplog.records] == [DEFECT, other]


async def test_an_outage_and_a_defect_are_told_apart_until_a_try_works() -> None:
    played = Played(None, AWAY, DEFECT, None)
    await played.loop.run()

    assert played.flags == [(True, False), (False, False), (False, True), (True, False)]


async def test_what_a_try_left_behind_is_put_right_each_time() -> None:
    played = Played(AWAY, AWAY, DEFECT, None, DEFECT)
    await played.loop.run()

    assert played.put_right == ["outage", "outage", "defect", "defect"]


async def test_it_ends_though_a_call_of_redis_swallowed_the_cancelling() -> None:
    tries = 0
    is_asking = asyncio.Event()

    async def swallows() -> None:
        nonlocal tries
        tries += 1
        is_asking.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return

    pauses: list[None] = []

    async def pause() -> None:
        pauses.append(None)

    task = asyncio.create_task(RedisLoop(swallows, pause, WORDS).run())
    await is_asking.wait()
    task.cancel()
    await asyncio.wait({task})

    assert (tries, pauses) == (1, [])
