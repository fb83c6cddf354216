"""Ends what a service leaves behind, also one that was killed: Ray's agents outlive a Ray that is gone, for minutes.

`python -m control_plane.service.reaper PID SERVICE_ID` remembers the processes under PID while it lives, and ends those
that are left when it has ended or when it asks for it with SIGTERM. It needs no signal and no pipe from the service:
Ray's processes inherit pipes and would keep them open.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Collection

import psutil

from control_plane.service.state import end_processes, processes_of

_LOOK_EVERY_S = 2.0
_GRACE_S = 5.0
_DISMISS_TIMEOUT_S = 20.0


def start(service_id: str) -> subprocess.Popen[bytes]:
    """Starts the reaper of this process, in a session of its own."""
    command = [sys.executable, "-m", "control_plane.service.reaper", str(os.getpid()), service_id]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)


def dismiss(process: subprocess.Popen[bytes]) -> None:
    """The service has stopped: the reaper ends what may be left, then itself."""
    process.terminate()
    try:
        process.wait(_DISMISS_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()


def watch(
    service: psutil.Process, dismissed: threading.Event, others: Collection[psutil.Process] = ()
) -> set[psutil.Process]:
    """Waits for the end of the service; returns what is under it, still runs and is none of `others`."""
    under: set[psutil.Process] = set()
    while True:
        last = dismissed.wait(_LOOK_EVERY_S)
        try:
            under |= set(service.children(recursive=True)) - set(others)
            last |= service.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            last = True
        under = {process for process in under if process.is_running() and process.pid != os.getpid()}
        if last:
            return under


def main(service_pid: int, service_id: str) -> None:
    dismissed = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: dismissed.set())
    try:
        service = psutil.Process(service_pid)
        # What the process had started before its service belongs to somebody else.
        left = watch(service, dismissed, service.children(recursive=True))
    except psutil.NoSuchProcess:
        left = set()
    end_processes({*left, *processes_of(service_id)}, _GRACE_S)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
