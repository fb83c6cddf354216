"""A child process that does not outlive its parent, not even one that is killed."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

# Runs first in the child: the kernel ends it when the thread that started it ends (Linux, PR_SET_PDEATHSIG), and so
# what it becomes by exec. Not a function between fork and exec, as subprocess offers it: for that Python has to fork
# instead of vfork, and the handlers that gRPC registers for a fork have ended such a child before it was anything.
_BIND = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""


def bound(*command: str) -> list[str]:
    """The command as it is started by this process, whose end is its own."""
    return [sys.executable, "-I", "-S", "-c", _BIND, str(os.getpid()), *command]


def start_bound(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """Starts `command`, bound to the thread that called this, and out of reach of a terminal's Ctrl-C."""
    with log.open("ab") as output:
        return subprocess.Popen(
            bound(*command), stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )


def stop(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    """Asks it to end, and ends it when it does not."""
    process.terminate()
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(timeout_s)
