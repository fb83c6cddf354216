"""Tasks in the background end with their parent, and what fails in them is heard of."""

import asyncio

import pytest

from cluster_core.background import BackgroundTasks


async def forever() -> None:
    await asyncio.Event().wait()


async def fails() -> None:
    raise ZeroDivisionError("of a test")


async def test_it_knows_those_that_run() -> None:
    background, end = BackgroundTasks(), asyncio.Event()

    async def until_end() -> None:
        await end.wait()

    first, second = background.start(until_end()), background.start(until_end())
    assert (len(background), list(background)) == (2, [first, second])
    end.set()
    await asyncio.wait({first, second})

    assert len(background) == 0


async def test_cancelling_returns_once_all_have_ended() -> None:
    background = BackgroundTasks()
    ended: list[str] = []

    async def ends_slowly() -> None:
        try:
            await forever()
        finally:
            await asyncio.sleep(0)
            ended.append("slowly")

    background.start(ends_slowly())
    await asyncio.sleep(0)
    await background.cancel()

    assert (ended, len(background)) == (["slowly"], 0)


async def test_those_that_take_too_long_are_cancelled() -> None:
    background = BackgroundTasks()
    late = background.start(forever())
    await background.wait(0.0)
    await asyncio.wait({late})

    assert late.cancelled()


async def test_waiting_for_nothing_returns_at_once() -> None:
    await BackgroundTasks().wait(60.0)


async def test_what_fails_is_logged_unless_the_parent_wants_to_hear_it(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[BaseException] = []
    await asyncio.wait({BackgroundTasks(heard.append).start(fails())})
    await asyncio.sleep(0)
    assert [str(error) for error in heard] == ["of a test"] and not caplog.records

    await asyncio.wait({BackgroundTasks().start(fails())})
    await asyncio.sleep(0)
    assert [record.getMessage() for record in caplog.records] == ["a task in the background failed on a defect"]
