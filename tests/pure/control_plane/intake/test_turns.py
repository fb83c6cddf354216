"""What comes or goes at once, spread over turns of the loop."""

import asyncio
from collections import Counter

import pytest

from cluster_core.errors import UnavailableError
from control_plane.intake.turns import MOST_A_TURN, Turns

_CALLS = 5 * MOST_A_TURN + 1


class Loop:
    """Counts the turns of the loop."""

    def __init__(self) -> None:
        self.turn = 0
        self._loop = asyncio.get_running_loop()
        self._next()

    def _next(self) -> None:
        self.turn += 1
        self._loop.call_soon(self._next)


async def test_so_many_begin_in_one_turn_and_all_in_their_order() -> None:
    turns, loop = Turns(), Loop()
    began: list[tuple[int, int]] = []

    async def work(number: int) -> int:
        began.append((loop.turn, number))
        return number

    assert await asyncio.gather(*(turns.run(work(number)) for number in range(_CALLS))) == list(range(_CALLS))

    assert [number for _, number in began] == list(range(_CALLS))
    assert max(Counter(turn for turn, _ in began).values()) <= MOST_A_TURN


async def test_so_many_are_cancelled_in_one_turn() -> None:
    turns, loop = Turns(), Loop()
    ended: Counter[int] = Counter()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended[loop.turn] += 1

    calls = [asyncio.create_task(turns.run(work())) for _ in range(_CALLS)]
    for _ in range(2 * _CALLS):
        await asyncio.sleep(0)
    for call in calls:
        call.cancel()
    results = await asyncio.gather(*calls, return_exceptions=True)

    assert all(isinstance(result, asyncio.CancelledError) for result in results)
    assert ended.total() == _CALLS
    assert max(ended.values()) <= MOST_A_TURN


async def test_who_is_cancelled_before_its_turn_never_begins_and_takes_nobodys() -> None:
    turns, began = Turns(), []

    async def work(number: int) -> None:
        began.append(number)

    calls = [asyncio.create_task(turns.run(work(number))) for number in range(2 * MOST_A_TURN)]
    await asyncio.sleep(0)
    for call in calls[MOST_A_TURN:-1]:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)

    assert began == [*range(MOST_A_TURN), 2 * MOST_A_TURN - 1]


async def test_what_work_raises_is_raised_and_what_it_answers_while_it_is_cancelled_is_not() -> None:
    turns = Turns()

    async def fails() -> None:
        raise UnavailableError("gone")

    async def fails_when_cancelled() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise UnavailableError("gone")

    with pytest.raises(UnavailableError):
        await turns.run(fails())
    call = asyncio.create_task(turns.run(fails_when_cancelled()))
    for _ in range(10):
        await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
