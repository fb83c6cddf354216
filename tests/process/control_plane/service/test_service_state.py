"""The file that a running service is found by, once its process is dead."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from control_plane.service.state import ServiceState, StateFile


def state_of(process: psutil.Process, service_id: str = "svc-1") -> ServiceState:
    return ServiceState(service_id, "127.0.0.1:7421", "127.0.0.1:7422", process.pid, process.create_time())


MINE = state_of(psutil.Process())


@pytest.fixture
def state_file(tmp_path: Path) -> StateFile:
    return StateFile(tmp_path / "state")


def test_the_file_of_a_dead_process_counts_as_none_and_may_be_claimed(state_file: StateFile) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        dead = state_of(psutil.Process(child.pid))
        state_file.claim(dead)
        assert state_file.read() == dead
        child.communicate(b"\n")

    assert state_file.read() is None
    state_file.claim(MINE)
    assert state_file.read() == MINE
