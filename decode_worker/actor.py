"""The decode worker as a Ray actor."""

import ray

from cluster_core.event_log import LogRules
from decode_worker.service import DecodeService
from worker_runtime.actor import WorkerActor
from worker_runtime.host import WorkerSettings


@ray.remote
class DecodeWorker(WorkerActor):
    def __init__(self, settings: WorkerSettings, logs: LogRules) -> None:
        super().__init__(settings, DecodeService, logs)
