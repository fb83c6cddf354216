"""What both kinds of Ray actor have in common: a `WorkerHost` in the actor's process.

Ray runs the constructor again when it restarts a dead actor, and the constructor starts the host, so a restarted
worker registers and serves without anybody telling it to.
"""

import os
import threading
from collections.abc import Callable
from functools import partial

import ray
from rachis.v1 import worker_pb2 as wire

from cluster_core import event_log
from cluster_core.event_log import LogRules
from worker_runtime import own_logs
from worker_runtime.host import WorkerHost, WorkerSettings
from worker_runtime.own_node import NodePlace
from worker_runtime.service import WorkerServiceBase

# A worker that was stopped ends by itself then: whoever stopped it has its answer, and ends it before.
_RETIRES_AFTER_S = 5.0


class WorkerActor:
    """Base of the Ray actors. Its methods answer from threads: the engine and the server have their own."""

    def __init__(self, settings: WorkerSettings, service: Callable[..., WorkerServiceBase], logs: LogRules) -> None:
        event_log.set_up(settings.service_id, settings.worker_id, logs)
        logged = own_logs.reader(settings.service_id)
        self._host = WorkerHost(settings, partial(service, logs=logged), _place, _retire)
        # Ray runs a constructor on the main thread, which goes on to run Python's handlers of signals.
        self._host.end_on_sigterm()
        self._host.start_in_background()

    def wait_ready(self, timeout_s: float) -> bytes:
        """The serialised registration once the worker serves. Raises StartError."""
        record: wire.WorkerRegistration = self._host.wait_ready(timeout_s)
        return record.SerializeToString()

    def pid(self) -> int:
        return os.getpid()

    def stop(self, timeout_s: float) -> bool:
        """The process follows: also where whoever asked for it has died meanwhile."""
        is_over = self._host.stop(timeout_s)
        threading.Timer(_RETIRES_AFTER_S, _retire).start()
        return is_over


def _retire() -> None:
    """Ends this process, which Ray does not start again."""
    ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


def _place() -> NodePlace:
    """As Ray knows this node."""
    # Several of one host share its address, and loopback.
    hosts = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    return NodePlace(ray.util.get_node_ip_address(), len(hosts))
