"""A Python that has loaded vLLM already, for the workers that Ray starts: each is forked, in milliseconds.

Loading vLLM takes ten seconds of CPU time, four fifths of a worker's start. Ray starts its workers with the command of
`py_executable`: this file as a program, which gives its arguments, environment and output to a server and ends as its
fork does. Ray knows a worker by the process that registers, as it does where workers run in containers.
`tests/hosts` starts its workers without this.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
# `ray.init` takes what this holds as part of its own job configuration.
JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
_SERVER = "tests.preloaded_server"


@contextmanager
def preloaded_python() -> Iterator[str]:
    """A server of this process. The job configuration with which Ray has a service's workers forked from it.

    Raises RuntimeError at the end where the server had died meanwhile.
    """
    with tempfile.TemporaryDirectory(prefix="rachis-preloaded-") as folder:
        address, log = Path(folder) / "server", Path(folder) / "log"
        with socket.socket(socket.AF_UNIX) as listener, log.open("wb") as output:
            listener.bind(os.fspath(address))
            listener.listen(64)
            # The server ends when its standard input does, so at the latest with this process.
            server = subprocess.Popen(
                [sys.executable, "-m", _SERVER, str(listener.fileno())],
                pass_fds=[listener.fileno()], stdin=subprocess.PIPE, stderr=output, cwd=ROOT,
            )  # fmt: skip
        try:
            yield json.dumps({"runtime_env": {"py_executable": f"{sys.executable} -I -S {__file__} {address}"}})
        finally:
            died = server.poll()
            assert server.stdin is not None
            server.stdin.close()
            server.wait(30)
        if died is not None:
            raise RuntimeError(f"the Python with vLLM loaded had ended with {died}: {log.read_text()[-2000:]}")


def _run_forked(address: str, arguments: list[str]) -> int:
    """As the server's fork ends, so does this process."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        call = {"arguments": arguments, "environment": dict(os.environ), "folder": str(Path.cwd())}
        socket.send_fds(server, [json.dumps(call).encode()], [0, 1, 2])
        ended = server.recv(16)
    return int(ended or b"1")


if __name__ == "__main__":
    sys.exit(_run_forked(sys.argv[1], sys.argv[2:]))
