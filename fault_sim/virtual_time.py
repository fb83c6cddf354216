"""An event loop whose clock is simulated: when nothing is ready, time jumps to the next timer.

Nothing is read or written, no thread is started: what would run in one runs at once. Tasks hash by the order in which
they were made, so that sets of them are walked alike in every run. A loop that has nothing left to wait for while its
main task is not done raises `Deadlock`: something is waited for that never comes.

Idea: FoundationDB's and TigerBeetle's simulators run production code on a clock of their own.
"""

import asyncio
import gc
import secrets
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any, TypeVar, cast
from unittest import mock

from cluster_core import clock

# What `unix_ms` begins at.
EPOCH_S = 1_700_000_000
# Ready callbacks in a row without time moving on; more of them is a loop that spins.
_MOST_AT_ONE_TIME = 2_000_000

_T = TypeVar("_T")


class Deadlock(Exception):
    """Nothing is ready, no timer is set, and the main task is not done."""


class Spinning(Exception):
    """Time does not move on."""


class _NumberedTask(asyncio.Task[Any]):
    """Hashes by its number instead of its address."""

    def __init__(self, *args: Any, number: int, **kwargs: Any) -> None:
        self._number = number
        super().__init__(*args, **kwargs)

    def __hash__(self) -> int:
        return self._number


class _Selector:
    """Where a real loop waits for sockets this one moves its clock."""

    def __init__(self, loop: "VirtualLoop") -> None:
        self._loop = loop

    def select(self, timeout_s: float | None) -> list[Any]:
        self._loop.wait(timeout_s)
        return []


class VirtualLoop(asyncio.BaseEventLoop):
    """`time()` is in seconds since the loop was made."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        self._turns = 0
        self._tasks_made = 0
        self._selector = _Selector(self)
        self.set_task_factory(self._make_task)
        # What was raised in some task and is no error of its code, such as the time limit of a test.
        self.interrupted_by: BaseException | None = None

    def time(self) -> float:
        return self._now_s

    def wait(self, timeout_s: float | None) -> None:
        """None: there is nothing to wait for."""
        if timeout_s is None:
            raise Deadlock(f"nothing is left to wait for at {self._now_s:.3f} s")
        self._turns = 0 if timeout_s > 0 else self._turns + 1
        if self._turns > _MOST_AT_ONE_TIME:
            raise Spinning(f"the loop spins at {self._now_s:.3f} s")
        self._now_s += timeout_s

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., _T], *args: Any
    ) -> "asyncio.Future[_T]":
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - it is the future's
            future.set_exception(error)
        return future

    def _make_task(self, loop: asyncio.AbstractEventLoop, coro: Any, **kwargs: Any) -> "asyncio.Task[Any]":
        self._tasks_made += 1
        task = _NumberedTask(coro, loop=loop, number=self._tasks_made, **kwargs)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: "asyncio.Task[Any]") -> None:
        # Private: `exception()` counts as looking at it, and errors that nobody looked at have to complain.
        error: BaseException | None = task._exception
        if error is not None and not isinstance(error, Exception | asyncio.CancelledError):
            self.interrupted_by = task.exception()
            self.stop()

    def _process_events(self, event_list: list[Any]) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """Nobody waits in another thread."""


class _Clock:
    """What `cluster_core.clock` reads in place of `time`."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def monotonic(self) -> float:
        return self._loop.time()

    def time_ns(self) -> int:
        return round((EPOCH_S + self._loop.time()) * 1e9)

    def process_time(self) -> float:
        return self._loop.time()


@contextmanager
def _seeded(loop: VirtualLoop, seed: int) -> Iterator[None]:
    """The one clock and the one source of random names follow the simulation; garbage is collected at its end only."""
    names = Random(f"names {seed}")
    gc.disable()
    with (
        mock.patch.object(clock, "time", _Clock(loop)),
        mock.patch.object(secrets, "token_hex", lambda size=8: f"{names.getrandbits(8 * size):0{2 * size}x}"),
    ):
        try:
            yield
        finally:
            gc.enable()


def run(main: Coroutine[Any, Any, _T], seed: int = 0) -> _T:
    """Runs it to its end in virtual time. Raises Deadlock, Spinning, what `main` raises, and what interrupts any task.

    When it returns all of it is gone: tasks whose errors were not looked at have complained.
    """
    # What is here already is not looked through at the end.
    gc.freeze()
    try:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner, _seeded(cast(VirtualLoop, runner.get_loop()), seed):
            try:
                return runner.run(main)
            finally:
                interrupted_by = cast(VirtualLoop, runner.get_loop()).interrupted_by
                if interrupted_by is not None:
                    raise interrupted_by
    finally:
        gc.collect()
        gc.unfreeze()
