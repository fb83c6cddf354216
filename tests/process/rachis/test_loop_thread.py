"""A loop in another thread, interrupted, closed and left behind where that is hardest to take."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar, cast

import pytest
from rachis.errors import ClosedError
from rachis.loop_thread import LoopThread
from rachis.session import AsyncSession
from rachis.sync import Session

T = TypeVar("T")
# Then a forked child that hangs is ended.
_CHILD_S = 30


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


class Opened:
    """Of an `AsyncSession`, what `Session` enters and leaves."""

    def __init__(self) -> None:
        self.left: list[type[BaseException] | None] = []

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        self.left.append(kind)


@pytest.mark.timeout(60)
def test_a_session_that_is_collected_in_the_loops_thread_is_left_there() -> None:
    """As a generator of a user's does that reads within `with client.session(...)`, left behind half read."""
    loop, opened = LoopThread(), Opened()

    def reads() -> Generator[int, None, None]:
        with Session(loop, cast(AsyncSession, opened)):
            yield 1

    each = reads()
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
    assert opened.left == [GeneratorExit]


def test_what_ends_a_sessions_block_is_raised_where_its_client_is_closed_too() -> None:
    loop, opened = LoopThread(), Opened()
    with pytest.raises(LookupError, match="no such page"), Session(loop, cast(AsyncSession, opened)):
        loop.close()
        raise LookupError("no such page")
    assert opened.left == []


@pytest.mark.timeout(60)
def test_the_loops_own_thread_is_told_that_it_cannot_wait_for_itself() -> None:
    loop = LoopThread()

    async def waits() -> None:
        loop.wait(asyncio.sleep(0))

    with pytest.raises(RuntimeError, match="own thread cannot wait"):
        loop.wait(waits())
    assert loop.wait(asyncio.sleep(0, "it runs")) == "it runs"
    loop.close()


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
    held, forked = threading.Event(), threading.Event()

    def hold() -> None:
        # As another thread that gives the loop something has it, for a moment that no public event tells.
        with loop._running._lock:
            held.set()
            forked.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    child = os.fork()
    if not child:
        # Where it waits for ever.
        signal.alarm(_CHILD_S)
        try:
            loop.wait(asyncio.sleep(0))
        except ClosedError as error:
            # What it is to run before, nobody would run there.
            loop.close(asyncio.sleep(0))
            os._exit(3 if "does not outlive a fork" in str(error) else 4)
        os._exit(5)
    forked.set()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 3
    holder.join()
    assert loop.wait(asyncio.sleep(0, "it runs")) == "it runs"
    loop.close()


FORKED = """
import os
import signal
import sys
from rachis import Client, ClosedError

BEFORE
child = os.fork()
signal.alarm(30)
if child:
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
for ask in (lambda: client.is_serving(0.1), lambda: Client("127.0.0.1:1").is_serving(0.1)):
    try:
        print(ask())
    except (ClosedError, NameError) as error:
        print(error)
# As multiprocessing ends its children: gRPC takes itself down with the interpreter, and was seen to crash in that once.
sys.stdout.flush()
os._exit(0)
"""
NO_CLIENT = "a client does not outlive a fork: make the first one in the child\n"


@pytest.mark.parametrize(
    ("before", "said"),
    [
        ("", "name 'client' is not defined\nFalse\n"),
        ("client = Client('127.0.0.1:1')", NO_CLIENT * 2),
        ("client = Client('127.0.0.1:1'); client.close()", NO_CLIENT * 2),
    ],
)
def test_in_a_fork_of_who_had_a_client_there_is_none(before: str, said: str) -> None:
    """gRPC would wait there for ever."""
    script = FORKED.replace("BEFORE", before)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout) == (0, said), ended.stderr
