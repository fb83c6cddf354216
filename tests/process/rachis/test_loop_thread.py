"""A loop in another thread, interrupted, closed and left behind where that is hardest to take."""

import asyncio
import gc
import os
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import pytest
from rachis.loop_thread import ClosedError, LoopThread

T = TypeVar("T")


class InterruptedLoop(LoopThread):
    """Ctrl-C comes when the loop has been given what is to be waited for, and before anybody waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.comes_now = False

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if self.comes_now:
            self.comes_now = False
            self._running.give(coroutine)
            raise KeyboardInterrupt
        return super().wait(coroutine)


@pytest.mark.timeout(60)
def test_an_interrupt_before_anybody_waits_ends_the_iterator() -> None:
    """It has cancelled nothing: the item that never comes would be waited for by whoever closes the iterator."""
    closed = []

    async def items() -> AsyncGenerator[int, None]:
        try:
            yield 1
            await asyncio.Event().wait()
        finally:
            closed.append(True)

    loop = InterruptedLoop()
    found = []
    with pytest.raises(KeyboardInterrupt):
        for item in loop.each(items()):
            found.append(item)
            loop.comes_now = True
    loop.close()
    assert (found, closed) == ([1], [True])


def test_an_iterator_that_ends_by_itself_gives_everything() -> None:
    async def items() -> AsyncGenerator[int, None]:
        for number in range(3):
            yield number

    loop = LoopThread()
    assert list(loop.each(items())) == [0, 1, 2]
    loop.close()


async def endless(closed: list[bool]) -> AsyncGenerator[int, None]:
    try:
        yield 1
        await asyncio.Event().wait()
    finally:
        closed.append(True)


HALF_READ = """
import asyncio
from rachis.loop_thread import LoopThread

async def items():
    yield 1
    await asyncio.Event().wait()

each = LoopThread().each(items())
print(next(each))
"""


@pytest.mark.parametrize("cycle", ["", "held = [each]; held.append(held); del each, held"])
def test_a_process_that_has_read_an_iterator_in_part_ends(cycle: str) -> None:
    """When nobody can be waited for in a thread that the interpreter has stopped."""
    ended = subprocess.run([sys.executable, "-c", HALF_READ + cycle], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "1\n", "")


@pytest.mark.timeout(60)
def test_an_iterator_that_is_collected_in_the_loops_thread_is_closed_there() -> None:
    loop, closed = LoopThread(), list[bool]()
    each = loop.each(endless(closed))
    assert next(each) == 1
    cycle: list[Any] = [each]
    cycle.append(cycle)

    async def collect() -> None:
        gc.collect()

    with collected_by_hand():
        del each, cycle
        loop.wait(collect())
    loop.wait(asyncio.sleep(0))
    loop.close()
    assert closed == [True]


@pytest.mark.timeout(60)
def test_who_closes_it_and_is_collected_in_its_thread_ends_it() -> None:
    """As a generator of a user's does that reads within `with Client(...)`, left behind half read."""
    loop, closed = LoopThread(), list[bool]()

    async def last() -> None:
        closed.append(False)

    def reads() -> Generator[int, None, None]:
        try:
            yield from loop.each(endless(closed))
        finally:
            loop.close(last())

    each = reads()
    assert next(each) == 1
    cycle: list[Any] = [each]
    cycle.append(cycle)

    async def collect() -> None:
        gc.collect()

    with collected_by_hand():
        del each, cycle
        with suppress(ClosedError):
            loop.wait(collect())
    # A second time it waits for the thread alone.
    loop.close()
    assert sorted(closed) == [False, True]


@contextmanager
def collected_by_hand() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.timeout(60)
def test_who_waits_when_another_thread_closes_is_told_so() -> None:
    for _ in range(20):
        loop, closed = LoopThread(), list[bool]()
        told: list[type[BaseException]] = []
        reading = threading.Barrier(4)

        def read(loop: LoopThread, closed: list[bool], told: list[type[BaseException]], reading: Any) -> None:
            each = loop.each(endless(closed))
            next(each)
            reading.wait()
            try:
                next(each)
            except BaseException as error:  # noqa: BLE001 - whatever it is told
                told.append(type(error))

        def close(loop: LoopThread, reading: Any) -> None:
            reading.wait()
            loop.close(asyncio.sleep(0))

        threads = [threading.Thread(target=read, args=(loop, closed, told, reading)) for _ in range(2)]
        threads += [threading.Thread(target=close, args=(loop, reading)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert told == [ClosedError] * 2
        assert closed == [True] * 2


def test_a_closed_one_takes_nothing_and_closes_again_for_nothing() -> None:
    loop, lasts = LoopThread(), list[str]()

    async def last(name: str) -> None:
        lasts.append(name)
        with pytest.raises(ClosedError):
            # What it is given before it ends it does not begin.
            await asyncio.to_thread(loop.wait, asyncio.sleep(0))

    loop.close(last("first"))
    loop.close(last("second"))
    with pytest.raises(ClosedError, match="the client is closed"):
        loop.wait(asyncio.sleep(0))
    assert loop.closed and lasts == ["first"]


@pytest.mark.timeout(60)
def test_one_that_nobody_has_any_more_ends_its_thread() -> None:
    before = {thread for thread in threading.enumerate() if thread.name == "rachis-client"}
    loop = LoopThread()
    (own,) = (thread for thread in threading.enumerate() if thread.name == "rachis-client" and thread not in before)
    del loop
    gc.collect()
    own.join()


@pytest.mark.timeout(60)
def test_a_fork_leaves_the_loop_to_its_parent() -> None:
    loop = LoopThread()
    child = os.fork()
    if not child:
        # What it is to run before, nobody would run there.
        loop.close(asyncio.sleep(0))
        os._exit(3)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 3
    assert loop.wait(asyncio.sleep(0, "it runs")) == "it runs"
    loop.close()
