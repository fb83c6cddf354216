"""What is left under a service that has ended is found, whichever way it ended."""

import subprocess
import sys
import threading

import psutil

from control_plane.service import reaper
from control_plane.service import state as service_state

# A parent that starts a child, tells its number, and waits to be ended; the child waits as well.
_PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
print(child.pid, flush=True)
sys.stdin.read()
"""


def _family() -> tuple[subprocess.Popen[bytes], psutil.Process]:
    parent = subprocess.Popen([sys.executable, "-c", _PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    return parent, psutil.Process(int(parent.stdout.readline()))


def test_processes_under_a_service_are_found_when_it_dismisses_its_reaper() -> None:
    parent, child = _family()
    dismissed = threading.Event()
    dismissed.set()
    service = psutil.Process(parent.pid)
    assert reaper.watch(service, dismissed, others=[child]) == set()
    left = reaper.watch(service, dismissed)
    assert left == {child}
    service_state.end_processes([*left, psutil.Process(parent.pid)], 5.0)
    assert not child.is_running()


def test_a_service_that_is_gone_before_the_first_look_leaves_nothing_to_find() -> None:
    parent, child = _family()
    service = psutil.Process(parent.pid)
    parent.kill()
    parent.wait()
    assert reaper.watch(service, threading.Event()) == set()
    service_state.end_processes([child], 5.0)


def test_a_process_that_ignores_the_request_to_end_is_ended() -> None:
    stubborn = (
        "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen([sys.executable, "-c", stubborn], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    victim = psutil.Process(process.pid)
    service_state.end_processes([victim], 0.2)
    assert not victim.is_running()
