"""The processes of a grid end with the command, however that ends: their runs would go on for minutes."""

import subprocess
import sys
import time

import psutil

from tests import ROOT

_COMMAND = [
    sys.executable, "-m", "command_line.main", "bench", "system", "--grid", "--quick", "--json",
    "--kind", "decode_heavy", "--sizes", "64", "--seconds", "100000",
]  # fmt: skip
_FOR_S = 120.0
# Of CPU time: longer than a process of the pool takes to start.
_STARTED_S = 3.0


def test_nobody_goes_on_with_a_grid_whose_command_has_ended() -> None:
    with subprocess.Popen(_COMMAND, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as command:
        try:
            computing = _computing(command.pid)
        finally:
            command.kill()
    _, alive = psutil.wait_procs(computing, timeout=_FOR_S)
    for each in alive:
        each.kill()
    assert computing
    assert not alive


def _computing(pid: int) -> list[psutil.Process]:
    """The processes of the pool, once one of them simulates."""
    end_s = time.monotonic() + _FOR_S
    while time.monotonic() < end_s:
        children = [each for each in psutil.Process(pid).children() if "spawn_main" in " ".join(each.cmdline())]
        if any(each.cpu_times().user > _STARTED_S for each in children):
            return children
        time.sleep(0.1)
    return []
