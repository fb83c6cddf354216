"""Tests of timeouts and pauses, in no time: when nothing else is left to do, the clock jumps to the next timer."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from fault_sim.virtual_time import VirtualLoop

_T = TypeVar("_T")


def run(main: Coroutine[Any, Any, _T]) -> _T:
    """To its end. What it waits for must come of itself or of a timer, else it raises `Deadlock`."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
