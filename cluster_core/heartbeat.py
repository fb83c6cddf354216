"""The heartbeat of an engine: how long the step or command that runs now has taken, and whether it hangs there. Pure.

A kernel that never returns, a deadlock in a transfer library and a frozen process all look alike from outside: a step
began, and does not end. Steps of one engine differ by orders of magnitude, so what is too long goes by the slowest ones
of late. Between two steps commands are carried out, which may read a disk or ask other processes. Copies between device
and host memory run beside steps, one after the other: an engine of which none ends any more hangs, too, though it
steps. Written by the engine's thread, read anywhere.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cluster_core.clock import monotonic_s

# A step is never called hanging before.
LEAST_S = 1.5
# The first steps of an engine may compile, load and allocate. Who is called hanging for that loses its calls to workers
# that are warm, where there are any, and has `limits.stall_timeout_s` before it is ended.
FIRST_S = 10.0
_FIRST_STEPS = 3
# How long a copy may take, besides the step at whose end it is noticed.
COPY_S = 10.0
# How long a command may take: an adapter of gigabytes is read from a slow disk.
COMMAND_S = 30.0
# Of the slowest step of late.
_TIMES = 5.0
# What is left of the slowest step with each one after it: about the last thousand count.
_KEEP = 0.999


class Heartbeat:
    def __init__(self, now_s: Callable[[], float] = monotonic_s) -> None:
        self._now_s = now_s
        self._began_s: float | None = None
        self._command_began_s: float | None = None
        # How long a copy beside steps had been due when the last step had ended.
        self._copy_due_s = 0.0
        self._slowest_s = 0.0
        self._steps = 0

    @property
    def patience_s(self) -> float:
        """How long a step may take."""
        if self._steps < _FIRST_STEPS:
            return FIRST_S
        return max(LEAST_S, _TIMES * self._slowest_s)

    @property
    def stalled_s(self) -> float:
        """How long the engine has been in its step or command, or a copy is due, where it hangs there; 0 where it
        works, or has nothing to do."""
        patience_s = self.patience_s
        bounds = (
            (self._since_s(self._began_s), patience_s),
            (self._since_s(self._command_began_s), COMMAND_S),
            (self._copy_due_s, COPY_S + patience_s),
        )
        return max((each_s for each_s, bound_s in bounds if each_s > bound_s), default=0.0)

    def copies(self, due_since_s: float | None) -> None:
        """After each step: since when a copy beside steps is due, None where none is.

        Only a step notices that a copy has ended: what passes between two steps is not the copy's.
        """
        self._copy_due_s = self._now_s() - due_since_s if due_since_s is not None else 0.0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around each step."""
        began_s = self._began_s = self._now_s()
        try:
            yield
        finally:
            self._began_s = None
            self._slowest_s = max(self._slowest_s * _KEEP, self._now_s() - began_s)
            self._steps += 1

    @contextmanager
    def command(self) -> Iterator[None]:
        """Around each command. It says nothing of how long steps take."""
        self._command_began_s = self._now_s()
        try:
            yield
        finally:
            self._command_began_s = None

    def _since_s(self, began_s: float | None) -> float:
        return self._now_s() - began_s if began_s is not None else 0.0
