"""The prefill worker as a Ray actor."""

import ray

from prefill_worker.service import PrefillService
from worker_runtime.actor import WorkerActor
from worker_runtime.host import WorkerSettings


@ray.remote
class PrefillWorker(WorkerActor):
    def __init__(self, settings: WorkerSettings, log_level: str) -> None:
        super().__init__(settings, PrefillService, log_level)
