"""The server behind `preloaded_python`: it has loaded vLLM, or another module, and is forked for each call."""

import importlib
import json
import os
import random
import runpy
import selectors
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cluster_core.bound_child import bind_to_parent

_LARGEST_CALL = 1 << 20
# A caller that has connected sends its call at once. One that does not must not keep the others waiting.
_CALL_S = 10.0


@dataclass(frozen=True, slots=True)
class Call:
    """A script, or `-m` and a module, with its arguments, as a process of its own would have got them.

    files: standard input and outputs.
    """

    arguments: list[str]
    environment: dict[str, str]
    folder: str
    files: list[int]

    def become(self) -> None:
        """Ends with the script, and with the server. It has a group of processes of its own: Ray ends workers by their
        groups."""
        os.setsid()
        for number, file in enumerate(self.files):
            os.dup2(file, number)
            os.close(file)
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.folder)
        random.seed()
        # Options of the interpreter come first.
        first = next(at for at, each in enumerate(self.arguments) if each.endswith(".py") or each == "-m")
        if self.arguments[first] == "-m":
            sys.argv, sys.path[0] = self.arguments[first + 1 :], self.folder
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = self.arguments[first:]
            sys.path[0] = str(Path(sys.argv[0]).parent)
            runpy.run_path(sys.argv[0], run_name="__main__")


def preload(module: str) -> None:
    """Without Ray, which cannot be forked: what vLLM would load of it is the server's, and connects no fork."""
    sys.modules["ray"] = None  # type: ignore[assignment]
    importlib.import_module(module)
    del sys.modules["ray"]


def next_call(listener: socket.socket) -> Call | None:
    """In each fork its call; in the server None, when its standard input has ended."""
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    woken.setblocking(False)
    signal.set_wakeup_fd(wake.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    server = os.getpid()
    running: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as ready:
        for each in (listener, woken, sys.stdin):
            ready.register(each, selectors.EVENT_READ)
        while True:
            for key, _ in ready.select():
                if key.fileobj is sys.stdin:
                    return None
                if key.fileobj is listener:
                    caller, call = _accept(listener)
                    if call is None:
                        caller.close()
                        continue
                    forked = os.fork()
                    if not forked:
                        bind_to_parent()
                        if os.getppid() != server:
                            # It has ended meanwhile.
                            os._exit(1)
                        signal.set_wakeup_fd(-1)
                        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                        for other in (listener, woken, wake, caller, *running.values()):
                            other.close()
                        return call
                    for file in call.files:
                        os.close(file)
                    running[forked] = caller
                    ready.register(caller, selectors.EVENT_READ, forked)
                elif key.fileobj is woken:
                    woken.recv(1024)
                    _answer_ended(running, ready)
                elif key.data in running:
                    if told := running[key.data].recv(16):
                        os.kill(key.data, int(told))
                    else:
                        # Whoever stood for the fork is gone, and ends it so.
                        ready.unregister(key.fileobj)
                        os.kill(key.data, signal.SIGKILL)


def _accept(listener: socket.socket) -> tuple[socket.socket, Call | None]:
    """None: the caller has gone again, or says nothing."""
    caller, _ = listener.accept()
    caller.settimeout(_CALL_S)
    try:
        text, files, _, _ = socket.recv_fds(caller, _LARGEST_CALL, 3)
    except OSError:
        return caller, None
    caller.settimeout(None)
    return caller, Call(**json.loads(text), files=files) if text else None


def _answer_ended(running: dict[int, socket.socket], ready: selectors.BaseSelector) -> None:
    for forked in list(running):
        ended, status = os.waitpid(forked, os.WNOHANG)
        if ended:
            caller, code = running.pop(forked), os.waitstatus_to_exitcode(status)
            if caller in ready.get_map():
                ready.unregister(caller)
                # Of a process that a signal has ended, what a shell would say. Whoever stood for it may be gone, too.
                with suppress(OSError):
                    caller.send(str(code if code >= 0 else 128 - code).encode())
            caller.close()


if __name__ == "__main__":
    preload(sys.argv[2])
    call = next_call(socket.socket(fileno=int(sys.argv[1])))
    if call is not None:
        call.become()
