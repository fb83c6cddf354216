"""The worker that does both as a Ray actor."""

from functools import partial

import ray

from cluster_core.event_log import LogRules
from shared_worker.service import SharedService
from worker_runtime.actor import WorkerActor
from worker_runtime.host import WorkerSettings


@ray.remote
class SharedWorker(WorkerActor):
    def __init__(self, settings: WorkerSettings, logs: LogRules) -> None:
        interval_ms = settings.engine.streaming.progress_interval_ms
        super().__init__(settings, partial(SharedService, progress_interval_ms=interval_ms), logs)
