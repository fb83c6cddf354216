"""The loop of the runs with faults: time jumps, nothing really waits, and who waits for ever is told."""

import asyncio
import secrets
import time

import pytest

from cluster_core.clock import monotonic_s, unix_ms
from fault_sim import virtual_time
from fault_sim.virtual_time import EPOCH_S, Deadlock


def test_hours_pass_in_no_time_and_every_clock_shows_them() -> None:
    async def main() -> tuple[float, float, int]:
        await asyncio.sleep(7200)
        return asyncio.get_running_loop().time(), monotonic_s(), unix_ms()

    # Two hours of real time would run into the limit of every test.
    assert virtual_time.run(main()) == (7200, 7200, 1000 * (EPOCH_S + 7200))


def test_timers_go_off_in_order_and_timeouts_in_time() -> None:
    async def main() -> list[float]:
        seen: list[float] = []

        async def note(delay_s: float) -> None:
            await asyncio.sleep(delay_s)
            seen.append(monotonic_s())

        await asyncio.gather(note(3), note(1), note(2))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.Event().wait()
        seen.append(monotonic_s())
        return seen

    assert virtual_time.run(main()) == [1, 2, 3, 8]


def test_who_waits_for_what_never_comes_is_a_deadlock() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        virtual_time.run(main())


def test_what_interrupts_a_task_interrupts_the_run() -> None:
    """The time limit of a test is raised in whatever runs then: kept by a task, it passes for a fault of the code."""

    class Interrupted(BaseException):
        pass

    async def task() -> None:
        await asyncio.sleep(1)
        raise Interrupted

    async def main() -> None:
        kept = asyncio.create_task(task())
        await asyncio.sleep(5)
        assert kept.done()

    with pytest.raises(Interrupted):
        virtual_time.run(main())


def test_threads_are_not_used() -> None:
    async def main() -> tuple[int, str]:
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 // 0)
        return await asyncio.to_thread(lambda: 5), await asyncio.to_thread(lambda: str(monotonic_s()))

    assert virtual_time.run(main()) == (5, "0.0")


def test_names_come_from_the_seed_and_the_clocks_are_given_back() -> None:
    async def main() -> str:
        return secrets.token_hex(8)

    names = [virtual_time.run(main(), seed) for seed in (1, 1, 2)]

    assert names[0] == names[1] != names[2]
    assert len(names[0]) == 16
    before_s = time.monotonic()
    assert before_s <= monotonic_s() <= time.monotonic()
    assert len({secrets.token_hex(8) for _ in range(3)}) == 3
