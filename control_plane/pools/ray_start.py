"""Starting Ray on this host again where the machine was too busy: it gives its own node 30 s, and no setting more."""

from collections.abc import Callable
from typing import Any

import ray

# How often a Ray is started that is late, before it is given up.
STARTS = 3
_LATE = ("The current node timed out during startup", "Failed to connect to GCS")


def start_ray(init: Callable[[], Any]) -> Any:
    """What `init` gives, which calls `ray.init`. Raises what it raises the last time, or where Ray was not late."""
    for _ in range(STARTS - 1):
        try:
            return init()
        except Exception as error:
            if not any(sentence in str(error) for sentence in _LATE):
                raise
            ray.shutdown()
    return init()
