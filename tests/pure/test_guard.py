"""The guard of the pure tests notices each thing that a pure test must not do."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import grpc.aio
import pytest

from tests import simulated_time
from tests.pure.guard import IMPURE, only_pure, refusing


@pytest.fixture(autouse=True)
def _refused() -> Iterator[None]:
    """As the session has it where nothing else runs."""
    with refusing():
        yield


def _tcp(act: str) -> None:
    with socket.socket() as plain:
        getattr(plain, act)(("127.0.0.1", 1))


async def _sleep() -> None:
    await asyncio.sleep(0.001)


async def _timer() -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(asyncio.Event().wait(), 0.01)


PLANTED: dict[str, Callable[[], Any]] = {
    "socket.bind": lambda: _tcp("bind"),
    "socket.connect": lambda: _tcp("connect"),
    "socket.connect_ex": lambda: _tcp("connect_ex"),
    "Thread.start": lambda: threading.Thread(target=int).start(),
    "Popen.__init__": lambda: subprocess.run(["true"], check=True),
    "os.fork": lambda: os.fork(),
    "os.system": lambda: os.system("true"),
    "time.sleep": lambda: time.sleep(0.001),
    "asyncio.sleep": lambda: asyncio.run(_sleep()),
    "EpollSelector.select": lambda: asyncio.run(_timer()),
    "grpc.server": lambda: grpc.server(None),  # type: ignore[arg-type]
    "grpc.insecure_channel": lambda: grpc.insecure_channel("127.0.0.1:1"),
    "grpc.secure_channel": lambda: grpc.secure_channel("127.0.0.1:1", grpc.ssl_channel_credentials()),
    "grpc.aio.server": lambda: grpc.aio.server(),
    "grpc.aio.insecure_channel": lambda: grpc.aio.insecure_channel("127.0.0.1:1"),
    "grpc.aio.secure_channel": lambda: grpc.aio.secure_channel("127.0.0.1:1", grpc.ssl_channel_credentials()),
}


@pytest.mark.parametrize("name", PLANTED)
def test_each_impure_thing_fails_the_test_with_where_it_belongs(name: str) -> None:
    with pytest.raises(pytest.fail.Exception, match=rf"\({name}\), .* under tests/process/"), only_pure():
        PLANTED[name]()


def test_a_failure_that_is_swallowed_comes_at_the_end() -> None:
    def swallows() -> None:
        with contextlib.suppress(BaseException):
            time.sleep(0.001)

    with pytest.raises(pytest.fail.Exception, match="sleeps"), only_pure():
        swallows()


def test_a_library_that_takes_seconds_to_import_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ray", raising=False)

    def imports() -> None:
        monkeypatch.setitem(sys.modules, "ray", socket)

    with pytest.raises(pytest.fail.Exception, match=r"imports ray, .* under tests/process/"), only_pure():
        imports()
    monkeypatch.undo()


def test_everything_is_itself_again_afterwards() -> None:
    before = [getattr(each.owner, each.name) for each in IMPURE]
    with refusing(), only_pure():
        pass

    assert [getattr(each.owner, each.name) for each in IMPURE] == before
    assert len(PLANTED) == len(IMPURE)


def test_turns_of_the_loop_and_simulated_time_are_free() -> None:
    async def pauses() -> None:
        await asyncio.sleep(0)

    async def sleeps() -> None:
        await asyncio.sleep(3600)

    with only_pure():
        asyncio.run(pauses())
        simulated_time.run(sleeps())


def test_what_an_import_does_is_free(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "module_with_a_thread.py").write_text("import threading\nthreading.Thread(target=int).start()\n")
    monkeypatch.syspath_prepend(tmp_path)

    with only_pure():
        __import__("module_with_a_thread")
