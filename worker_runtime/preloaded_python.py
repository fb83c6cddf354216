"""A Python that has loaded vLLM already, for the workers that Ray starts and a service's other processes that need it.

Loading vLLM takes ten seconds of CPU time, four fifths of a worker's start; a fork takes milliseconds. Ray starts its
workers with the command of `py_executable`: this file as a program, which gives its arguments, environment and output
to a server, hands on what it is asked to end by, and ends as its fork does. Ray knows a worker by the process that
registers, as it does where workers run in containers. Imitated GPUs are started so, and the engines of tests.
"""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
_SERVER = "worker_runtime.preloaded_server"
_END_S = 30
_HANDED_ON = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def preloaded_python(module: str) -> Iterator[str]:
    """A server of this process, which has imported the module: the command that runs a script in a fork of it.

    Raises RuntimeError at the end where the server had died meanwhile.
    """
    with tempfile.TemporaryDirectory(prefix="rachis-preloaded-") as folder:
        address, log = Path(folder) / "server", Path(folder) / "log"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, log.open("wb") as output:
            listener.bind(os.fspath(address))
            listener.listen(64)
            # The server ends when its standard input does, so at the latest with this process.
            server = subprocess.Popen(
                [sys.executable, "-m", _SERVER, str(listener.fileno()), module],
                pass_fds=[listener.fileno()], stdin=subprocess.PIPE, stderr=output,
                # Ctrl-C is for whoever asks it to end.
                start_new_session=True,
            )  # fmt: skip
        try:
            yield shlex.join([sys.executable, "-I", "-S", __file__, str(address)])
        finally:
            died = server.poll()
            assert server.stdin is not None
            server.stdin.close()
            try:
                server.wait(_END_S)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait(_END_S)
        if died is not None:
            raise RuntimeError(f"the Python with {module} loaded had ended with {died}: {log.read_text()[-2000:]}")


def job_config(command: str) -> dict[str, str]:
    """The environment of a service that starts processes with vLLM so: `ray.init` and `engine_python` read it."""
    return {JOB_VARIABLE: json.dumps({"runtime_env": {"py_executable": command}})}


def engine_python() -> list[str]:
    """What processes with vLLM are started with in this environment: as its workers are, where those are forks.

    What else somebody has Ray start workers with is for Ray alone.
    """
    try:
        command = shlex.split(json.loads(os.environ[JOB_VARIABLE])["runtime_env"]["py_executable"])
    except (KeyError, TypeError, ValueError):
        return [sys.executable]
    return command if __file__ in command else [sys.executable]


def _run_forked(address: str, arguments: list[str]) -> int:
    """As the server's fork ends, so does this process: it waits as long as a worker lives, or the server."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(address)
        call = {"arguments": arguments, "environment": dict(os.environ), "folder": str(Path.cwd())}

        def hand_on(number: int, _: object) -> None:
            with suppress(OSError):
                server.send(str(number).encode())

        # The fork may run before the call returns: what comes meanwhile is for it as well, and goes behind the call.
        signal.pthread_sigmask(signal.SIG_BLOCK, _HANDED_ON)
        for number in _HANDED_ON:
            signal.signal(number, hand_on)
        socket.send_fds(server, [json.dumps(call).encode()], [0, 1, 2])
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDED_ON)
        ended = server.recv(16)
    return int(ended or b"1")


if __name__ == "__main__":
    sys.exit(_run_forked(sys.argv[1], sys.argv[2:]))
