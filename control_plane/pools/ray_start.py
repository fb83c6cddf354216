"""Starting Ray on this host again where the machine was too busy: it gives its own node 30 s, and no setting more."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil
import ray

# How often a Ray is started that is late, before it is given up.
STARTS = 3
_LATE = ("The current node timed out during startup", "Failed to connect to GCS")
_END_S = 30.0


def start_ray(init: Callable[[], Any]) -> Any:
    """What `init` gives, which calls `ray.init`. Raises what it raises the last time, or where Ray was not late.

    A Ray that was late runs on, and nobody knows of it: it is ended, or it would take the next one's time. Nothing else
    starts processes meanwhile.
    """
    for _ in range(STARTS - 1):
        before = _own_processes()
        try:
            return init()
        except Exception as error:
            if not any(sentence in str(error) for sentence in _LATE):
                raise
            ray.shutdown()
            _end(_own_processes() - before)
    return init()


def _own_processes() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def _end(processes: set[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, _END_S)
