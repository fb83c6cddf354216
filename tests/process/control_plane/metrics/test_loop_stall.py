"""How long the loop is held up is told apart from how late it is."""

import asyncio
import itertools
import time

from control_plane.metrics.loop_stall import watch_loop


async def test_a_loop_that_others_kept_from_the_processor_has_not_been_held_up_by_its_work() -> None:
    seen: list[tuple[float, float]] = []
    # Of the loop's thread: as if it had worked for 10 ms between two looks, whatever the clock says.
    worked_s = itertools.count(0.0, 0.01)
    watching = asyncio.create_task(
        watch_loop(lambda late_s, own_s: seen.append((late_s, own_s)), 0.001, lambda: next(worked_s))
    )
    await asyncio.sleep(0)
    for _ in range(3):
        # It sleeps: late, and not at work.
        time.sleep(0.05)  # noqa: ASYNC251
        await asyncio.sleep(0.005)
    watching.cancel()
    late = [look for look in seen if look[0] > 0.04]
    assert late and all(abs(own_s - 0.01) < 1e-9 for _, own_s in late)
    assert all(own_s <= late_s for late_s, own_s in seen)
