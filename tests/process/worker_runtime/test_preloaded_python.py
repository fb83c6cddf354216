"""A Python that has loaded a module: its forks are as processes of their own, and end with whoever stands for them."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from worker_runtime import preloaded_python as preloaded
from worker_runtime.preloaded_python import JOB_VARIABLE, engine_python, job_config, preloaded_python

TIMEOUT_S = 60
MODULE = "colorsys"


@pytest.fixture
def command() -> Iterator[list[str]]:
    with preloaded_python(MODULE) as command:
        yield shlex.split(command)


def script(folder: Path, text: str) -> str:
    file = folder / "script.py"
    file.write_text(text)
    return str(file)


def run(
    command: list[str], *arguments: str, env: dict[str, str] | None = None, cwd: Path | None = None
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=env, cwd=cwd
    )


@contextmanager
def killed_at_the_end(*processes: "subprocess.Popen[str]") -> Iterator[None]:
    """Whatever the test has found, nobody waits for them."""
    try:
        yield
    finally:
        for process in processes:
            process.kill()


def until_ended(pid: int) -> None:
    end_s = time.monotonic() + TIMEOUT_S
    while psutil.pid_exists(pid):
        assert time.monotonic() < end_s, f"{pid} still runs"
        time.sleep(0.02)


def test_a_fork_has_its_callers_arguments_environment_folder_and_output(command: list[str], tmp_path: Path) -> None:
    said = "import os, sys; print(sys.argv[1:], os.environ['MINE'], len(os.environ['LONG']), os.getcwd()); sys.exit(3)"
    own = {**os.environ, "MINE": "this", "LONG": "x" * 100_000}
    ended = run(command, script(tmp_path, said), "a", "b c", env=own, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (3, f"['a', 'b c'] this 100000 {tmp_path}\n"), ended.stderr


def test_the_module_is_loaded_and_ray_is_not(command: list[str], tmp_path: Path) -> None:
    ended = run(command, script(tmp_path, f"import sys; print('{MODULE}' in sys.modules, 'ray' in sys.modules)"))
    assert ended.stdout == "True False\n", ended.stderr
    assert (
        MODULE
        not in subprocess.run(
            [sys.executable, "-c", "import sys; print(*sys.modules)"], capture_output=True, text=True, check=True
        ).stdout.split()
    )


def test_a_module_is_run_as_by_any_python(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "of_mine.py").write_text("import sys; print(__name__, sys.argv[1:])")
    ended = run(command, "-m", "of_mine", "-m", "x.py", cwd=tmp_path)
    assert ended.stdout == "__main__ ['-m', 'x.py']\n", ended.stderr


@pytest.mark.parametrize("asked", [signal.SIGTERM, signal.SIGINT])
def test_what_whoever_stands_for_it_is_asked_to_end_by_comes_to_the_fork(
    command: list[str], tmp_path: Path, asked: signal.Signals
) -> None:
    ends = f"""
import signal, sys
signal.signal({int(asked)}, lambda *_: sys.exit(7))
print("ready", flush=True)
signal.pause()
"""
    process = subprocess.Popen([*command, script(tmp_path, ends)], stdout=subprocess.PIPE, text=True)
    with process, killed_at_the_end(process):
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(asked)
        assert process.wait(TIMEOUT_S) == 7


def test_what_it_is_asked_while_the_fork_begins_goes_behind_the_call(tmp_path: Path) -> None:
    """The fork may run, and say so, before the call returns."""
    asked_at_once = f"""
import os, signal, socket, sys
sys.path.insert(0, {str(Path(preloaded.__file__).parent)!r})
import preloaded_python
send = socket.send_fds
socket.send_fds = lambda *args: (send(*args), os.kill(os.getpid(), signal.SIGTERM))
sys.exit(preloaded_python._run_forked(sys.argv[1], ["x.py"]))
"""
    address = str(tmp_path / "server")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen()
        listener.settimeout(TIMEOUT_S)
        process = subprocess.Popen([sys.executable, script(tmp_path, asked_at_once), address], text=True)
        with process, killed_at_the_end(process):
            caller, _ = listener.accept()
            caller.settimeout(TIMEOUT_S)
            assert json.loads(caller.recv(1 << 20))["arguments"] == ["x.py"]
            assert caller.recv(16) == str(int(signal.SIGTERM)).encode()
            caller.send(b"7")
            assert process.wait(TIMEOUT_S) == 7
            caller.close()


def test_the_python_of_a_services_processes_is_that_of_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(JOB_VARIABLE, raising=False)
    assert engine_python() == [sys.executable]
    for own in ('{"runtime_env": {"py_executable": "uv run"}}', '{"runtime_env": null}', "no JSON"):
        monkeypatch.setenv(JOB_VARIABLE, own)
        assert engine_python() == [sys.executable], "somebody's own is for Ray"
    command = f"this {preloaded.__file__} 'one here'"
    monkeypatch.setenv(JOB_VARIABLE, job_config(command)[JOB_VARIABLE])
    assert engine_python() == ["this", preloaded.__file__, "one here"]


def test_whoever_stands_for_a_killed_fork_says_so(command: list[str], tmp_path: Path) -> None:
    ended = run(command, script(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"))
    assert ended.returncode == 128 + signal.SIGKILL


def test_a_fork_ends_with_whoever_stands_for_it_and_others_do_not(command: list[str], tmp_path: Path) -> None:
    waits = script(tmp_path, "import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    first, second = (subprocess.Popen([*command, waits], stdout=subprocess.PIPE, text=True) for _ in range(2))
    assert first.stdout is not None and second.stdout is not None
    with first, second, killed_at_the_end(first, second):
        forks = [int(first.stdout.readline()), int(second.stdout.readline())]
        assert len({os.getpgid(fork) for fork in forks}) == 2, "Ray ends workers by their groups"
        first.kill()
        until_ended(forks[0])
        assert psutil.pid_exists(forks[1]) and second.poll() is None
        os.kill(forks[1], signal.SIGKILL)
        assert second.wait(TIMEOUT_S) == 128 + signal.SIGKILL


def test_whoever_stands_for_a_fork_and_the_fork_are_killed_together_and_others_go_on(
    command: list[str], tmp_path: Path
) -> None:
    waits = script(tmp_path, "import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    for _ in range(20):
        process = subprocess.Popen([*command, waits], stdout=subprocess.PIPE, text=True)
        with process, killed_at_the_end(process):
            assert process.stdout is not None
            fork = int(process.stdout.readline())
            process.kill()
            # The server may have been faster.
            with suppress(ProcessLookupError):
                os.kill(fork, signal.SIGKILL)
        until_ended(fork)
    assert run(command, script(tmp_path, "print('goes on')")).stdout == "goes on\n"


def test_forks_end_with_their_server_and_ctrl_c_does_not_reach_it(tmp_path: Path) -> None:
    parent = f"""
import os, shlex, subprocess, sys, time
from worker_runtime.preloaded_python import preloaded_python
with preloaded_python({MODULE!r}) as command:
    subprocess.run([*shlex.split(command), sys.argv[1]])
"""
    waits = script(tmp_path, "import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    process = subprocess.Popen(
        [sys.executable, "-c", parent, waits], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    with process, killed_at_the_end(process):
        assert process.stdout is not None
        fork = psutil.Process(int(process.stdout.readline()))
        server = fork.parent()
        assert server is not None and os.getpgid(server.pid) != os.getpgid(process.pid)
        process.kill()
        until_ended(fork.pid)
        until_ended(server.pid)


def test_a_module_that_does_not_load_is_said_at_the_end(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="No module named 'nowhere'"), preloaded_python("nowhere") as command:
        assert run(shlex.split(command), script(tmp_path, "print(1)")).returncode != 0
