"""A child process that the kernel ends with its parent, however that ends (Linux)."""

import ctypes
import signal

_PR_SET_PDEATHSIG = 1


def bind_to_parent() -> None:
    """Runs in the child: it ends when the thread that made it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
