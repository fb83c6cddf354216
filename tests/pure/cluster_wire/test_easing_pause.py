"""Polls come often while something comes, and seldom while nothing does."""

import asyncio
import itertools
from collections.abc import Iterable

import pytest

from cluster_wire.easing_pause import EasingPause
from tests.simulated_time import run

LEAST_S = 0.05


async def polls(length_s: float, news_s: Iterable[float] = (), most_s: float = 60.0) -> list[float]:
    """When a loop polls, in seconds from its start; news are told at these times."""
    loop = asyncio.get_running_loop()
    start_s = loop.time()
    pause = EasingPause(LEAST_S, most_s, loop.time)
    for at_s in news_s:
        loop.call_at(start_s + at_s, pause.came)
    times: list[float] = []
    while loop.time() - start_s < length_s:
        times.append(loop.time() - start_s)
        await pause()
    return times


def test_the_longest_pause_is_ten_shortest_ones_and_comes_after_as_long_a_quiet_time() -> None:
    times = run(polls(60))
    pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert pauses[0] == pytest.approx(LEAST_S)
    assert pauses[-1] == pytest.approx(10 * LEAST_S)
    # A pause counts from the poll before it, and is longer by what it takes itself.
    assert all(pause <= max(LEAST_S, 0.12 * at_s) + 1e-9 for at_s, pause in zip(times, pauses, strict=False))
    assert len(times) < 160, "of 1,200 polls with the shortest pause"


def test_news_end_a_long_pause_and_those_that_follow_are_short() -> None:
    times = [at_s for at_s in run(polls(62, [60.01])) if at_s >= 60]
    assert times[0] == pytest.approx(60.01)
    assert times[1] - times[0] == pytest.approx(LEAST_S)
    assert len(times) > 15


def test_news_that_come_all_the_time_do_not_make_polls_more_often_than_the_shortest_pause() -> None:
    times = run(polls(2, [each / 100 for each in range(200)]))
    assert len(times) == pytest.approx(2 / LEAST_S, abs=1)


def test_no_pause_is_longer_than_it_may_be_unless_the_shortest_is() -> None:
    times = run(polls(60, most_s=0.2))
    assert times[-1] - times[-2] == pytest.approx(0.2)
    times = run(polls(60, most_s=0.01))
    assert times[-1] - times[-2] == pytest.approx(LEAST_S)
