"""What a pure test must not do: the functions that would do it are replaced while the test runs, and name themselves.

Only real waiting counts: a loop whose clock is simulated (`fault_sim.virtual_time`) may sleep as long as it likes. What
is done while a module is imported does not count: libraries for numbers start threads then.
"""

import asyncio
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import grpc
import grpc.aio
import pytest

_MOVE = "which a pure test must not: move it to the module of the same name under tests/process/"


@dataclass(frozen=True, slots=True)
class Impure:
    """One function, and what a test does with it. is_meant: which calls of it count, by their arguments; None: all."""

    owner: Any
    name: str
    what: str
    is_meant: Callable[..., bool] | None = None


def _is_real_sleep(delay_s: float, *_: Any, **__: Any) -> bool:
    return delay_s > 0 and type(asyncio.get_running_loop()).time is asyncio.BaseEventLoop.time


def _is_wait(_: Any, timeout_s: float | None = None) -> bool:
    """The loop has nothing to do until a timer or, with None, something from outside wakes it."""
    return timeout_s is None or timeout_s > 0


IMPURE = (
    Impure(socket.socket, "bind", "binds a socket"),
    Impure(socket.socket, "connect", "connects a socket"),
    Impure(socket.socket, "connect_ex", "connects a socket"),
    Impure(threading.Thread, "start", "starts a thread"),
    Impure(subprocess.Popen, "__init__", "starts a process"),
    Impure(os, "fork", "starts a process"),
    Impure(os, "system", "starts a process"),
    Impure(time, "sleep", "sleeps"),
    Impure(asyncio, "sleep", "sleeps", _is_real_sleep),
    Impure(selectors.DefaultSelector, "select", "waits for a timer, or for what never comes", _is_wait),
    Impure(grpc, "server", "opens a gRPC server"),
    Impure(grpc, "insecure_channel", "opens a gRPC channel"),
    Impure(grpc, "secure_channel", "opens a gRPC channel"),
    Impure(grpc.aio, "server", "opens a gRPC server"),
    Impure(grpc.aio, "insecure_channel", "opens a gRPC channel"),
    Impure(grpc.aio, "secure_channel", "opens a gRPC channel"),
)
# Each takes a second or more to import: whoever needs one belongs under tests/process/ or tests/integration/.
HEAVY = frozenset({"matplotlib", "ray", "torch", "transformers", "vllm"})
# What was done since the guard was set up, the innermost last.
_done: list[list[str]] = []


@contextmanager
def refusing() -> Iterator[None]:
    """The functions are replaced: within `only_pure` they refuse, elsewhere they do what they always do."""
    before = [vars(each.owner).get(each.name) for each in IMPURE]
    for each in IMPURE:
        setattr(each.owner, each.name, _refusing(each))
    try:
        yield
    finally:
        for each, own in zip(IMPURE, before, strict=True):
            if own is None:
                # It is inherited.
                delattr(each.owner, each.name)
            else:
                setattr(each.owner, each.name, own)


@contextmanager
def only_pure() -> Iterator[None]:
    """Fails the test at the first impure thing that it does, or at its end where it swallowed that failure.

    It needs `refusing` around it, which takes as long as many a test and so is around all of them.
    """
    done: list[str] = []
    _done.append(done)
    light = _not_imported()
    try:
        yield
    finally:
        _done.pop()
    if imported := light - _not_imported():
        done.append(f"the test imports {', '.join(imported)}, {_MOVE}")
    if done:
        pytest.fail(done[0])


def _not_imported() -> frozenset[str]:
    # One by one: a difference of sets would look at thousands of modules, several times in each test.
    return frozenset(each for each in HEAVY if each not in sys.modules)


def _refusing(impure: Impure) -> Callable[..., Any]:
    original = getattr(impure.owner, impure.name)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        is_meant = _done and (impure.is_meant is None or impure.is_meant(*args, **kwargs))
        if not is_meant or _is_importing():
            return original(*args, **kwargs)
        said = f"the test {impure.what} ({impure.owner.__name__}.{impure.name}), {_MOVE}"
        _done[-1].append(said)
        pytest.fail(said)

    return refuse


def _is_importing() -> bool:
    """Whether the call comes of a module that is being imported."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False
