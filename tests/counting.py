"""Work that is counted instead of timed: the same on every machine, however busy it is."""

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar


def lines_run(action: Callable[[], object]) -> int:
    """How many lines of Python it runs, those of its calls and of each turn of a loop included.

    What is written in C counts as the one line that calls it; `Number` sees into that.
    """
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before, collects = sys.gettrace(), gc.isenabled()
    # What becomes garbage elsewhere runs lines of its own when it is collected, at any time.
    gc.disable()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return count


class Number(int):
    """Counts how often any of its kind is compared or hashed, as sorts, heaps, searches and tables do."""

    looks: ClassVar[int] = 0

    def __lt__(self, other: int) -> bool:
        Number.looks += 1
        return super().__lt__(other)

    def __eq__(self, other: object) -> bool:
        Number.looks += 1
        return super().__eq__(other)

    def __hash__(self) -> int:
        Number.looks += 1
        return super().__hash__()


def looks_at(action: Callable[[], object]) -> int:
    """How often it compares or hashes a `Number`."""
    before = Number.looks
    action()
    return Number.looks - before


def gloo_loops() -> int:
    """Threads of this process that serve a device of gloo."""
    return sum(task.read_text() == "gloo_tcp_loop\n" for task in Path("/proc/self/task").glob("*/comm"))
