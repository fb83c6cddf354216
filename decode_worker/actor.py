"""The decode worker as a Ray actor."""

import ray

from decode_worker.service import DecodeService
from worker_runtime.actor import WorkerActor
from worker_runtime.host import WorkerSettings


@ray.remote
class DecodeWorker(WorkerActor):
    def __init__(self, settings: WorkerSettings, log_level: str) -> None:
        super().__init__(settings, DecodeService, log_level)
