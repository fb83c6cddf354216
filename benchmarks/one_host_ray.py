"""A Ray of this host alone: services join it, come and go, and their workers outlive them.

`python -m benchmarks.one_host_ray CPUS` says `{"address": ...}` once it runs, and ends when it is asked
to or its parent has ended. For tests and measurements; in production `ray up` or `ray start` make the cluster.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial

import ray

from cluster_core.bound_child import bind_to_parent
from control_plane.pools.ray_start import start_ray
from control_plane.service import child_process

_START_TIMEOUT_S = 180.0
_STOP_TIMEOUT_S = 30.0
_OBJECT_STORE_BYTES = 80 << 20


@dataclass(frozen=True, slots=True)
class OneHostRay:
    """address: for `ray.address`. pid: of the process that all of it is below."""

    address: str
    pid: int


@contextlib.asynccontextmanager
async def one_host_ray(cpus: int) -> AsyncIterator[OneHostRay]:
    """Up inside the block."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", __name__, str(cpus),
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, preexec_fn=bind_to_parent,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        async with asyncio.timeout(_START_TIMEOUT_S):
            line = await process.stdout.readline()
        yield OneHostRay(json.loads(line)["address"], process.pid)
    finally:
        await child_process.end(process, _STOP_TIMEOUT_S)


def main(cpus: int) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")
    address = _started(cpus)
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: ended.set())
    sys.stdout.write(json.dumps({"address": address}) + "\n")
    sys.stdout.flush()
    # In steps: a handler runs between them, not within one.
    while not ended.wait(1.0):
        pass
    ray.shutdown()


def _started(cpus: int) -> str:
    """The address of a Ray that is up."""
    here = start_ray(
        partial(
            ray.init, address="local", num_cpus=cpus, include_dashboard=False, log_to_driver=False,
            logging_level="ERROR", object_store_memory=_OBJECT_STORE_BYTES, _node_ip_address="127.0.0.1",
        )
    )  # fmt: skip
    return str(here.address_info["gcs_address"])


if __name__ == "__main__":
    main(int(sys.argv[1]))
