"""What is wrong with a service now, under the names of the alerts for Prometheus, each of which has a runbook. Pure.

An alert for Prometheus waits until something has lasted; this says what one router sees at this moment. What takes a
longer memory than that, such as the share of requests that fail, is left to Prometheus and to `rachis doctor`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rachis.v1 import admin_pb2 as admin

from control_plane.metrics.families import pool_label
from control_plane.overview import complaints
from control_plane.overview.complaints import complaints_of
from control_plane.overview.rows import READY

# As in the alerts on these figures; those of one service at one time.
MOST_WAITING_PER_WORKER = 4
MOST_CLOCK_SKEW_S = 10.0
MOST_LAG_BATCHES = 100
FEWEST_MEASURED = 10
MOST_ALERTS = 50
CRITICAL, WARNING = "critical", "warning"


@dataclass(frozen=True, slots=True)
class Sight:
    """What one router sees of its service. views: with the load of their registrations. overview: without alerts."""

    overview: admin.GetOverviewResponse
    rows: Sequence[admin.WorkerRow]
    views: Sequence[admin.WorkerView]
    index: admin.GetIndexStatusResponse


class Wrong(NamedTuple):
    """subject: a worker, a pool, a part of the service."""

    subject: str
    sentence: str


_Look = Callable[[Sight], Iterator[Wrong]]


def _registry(sight: Sight) -> Iterator[Wrong]:
    if not sight.overview.router.registry_connected:
        yield Wrong("redis", "the registry (Redis) does not answer: the last known workers are used, and none can join")


def _queue_full(sight: Sight) -> Iterator[Wrong]:
    limit = sight.overview.max_queued_requests
    if limit and sight.overview.router.queued_requests >= limit:
        yield Wrong("router", f"the queue is full with {limit} requests: more are refused")


def _below_minimum(sight: Sight) -> Iterator[Wrong]:
    for pool in sight.overview.pools:
        ready = pool.workers.get(READY, 0)
        if ready < pool.minimum_workers:
            yield Wrong(pool_label(pool.pool), f"{ready} workers are ready, at least {pool.minimum_workers} are needed")


def _suspect(sight: Sight) -> Iterator[Wrong]:
    for view in sight.views:
        if view.suspect:
            yield Wrong(
                view.registration.worker_id, "gets no requests: a call to it has failed, and it has not answered since"
            )


def _complains(kind: str) -> _Look:
    """What `rachis status` says of workers."""

    def looks(sight: Sight) -> Iterator[Wrong]:
        for view in sight.views:
            for complaint in complaints.of_worker(view):
                if complaint.kind == kind:
                    yield Wrong(view.registration.worker_id, complaint.sentence)

    return looks


def _index_complains(kind: str) -> _Look:
    """What `rachis status` says of the index."""

    def looks(sight: Sight) -> Iterator[Wrong]:
        for complaint in complaints_of(sight.index):
            if complaint.kind == kind:
                yield Wrong("index", complaint.sentence)

    return looks


def _clocks(sight: Sight) -> Iterator[Wrong]:
    for view in sight.views:
        ahead_s = view.registration.clock_ahead_ms / 1000
        if abs(ahead_s) > MOST_CLOCK_SKEW_S:
            side = "ahead of" if ahead_s > 0 else "behind"
            yield Wrong(
                view.registration.worker_id, f"the clock of its host is {abs(ahead_s):.0f} s {side} that of Redis"
            )


def _queue_growing(sight: Sight) -> Iterator[Wrong]:
    """A moment's figure: the alert for Prometheus waits until it has been so for minutes."""
    workers = sum(row.state == READY for row in sight.rows)
    waiting = sight.overview.router.queued_requests + sum(pool.waiting_requests for pool in sight.overview.pools)
    if workers and waiting > MOST_WAITING_PER_WORKER * workers:
        yield Wrong("router", f"{waiting} requests wait for {workers} workers: more come than are served")


def _ttft(sight: Sight) -> Iterator[Wrong]:
    ttft = sight.overview.ttft
    if ttft.requests >= FEWEST_MEASURED and ttft.p90_s > ttft.objective_s:
        yield Wrong(
            "objectives.ttft_s",
            f"10% of the last {ttft.requests} requests waited {ttft.p90_s:.2f} s or more for their first token; "
            f"{ttft.objective_s:g} s are meant to be kept",
        )


def _lag(sight: Sight) -> Iterator[Wrong]:
    for worker in sight.index.workers:
        if worker.lag_batches > MOST_LAG_BATCHES:
            yield Wrong(worker.worker_id, f"the index is {worker.lag_batches} batches behind it")


def _poison(sight: Sight) -> Iterator[Wrong]:
    requests = sight.overview.router.poisoned_requests
    if requests:
        yield Wrong("router", f"{requests} requests, by what they ask for, are refused because engines died of them")


# The most severe first. Names and severities are those of cluster_configs/alerts.
LOOKS: tuple[tuple[str, str, _Look], ...] = (
    ("RachisRegistryUnreachable", CRITICAL, _registry),
    ("RachisPoolBelowMinimum", CRITICAL, _below_minimum),
    ("RachisRouterOverloaded", CRITICAL, _queue_full),
    ("RachisPoisonedRequest", CRITICAL, _poison),
    ("RachisWorkerHangs", WARNING, _complains("hangs")),
    ("RachisWorkerLost", WARNING, _suspect),
    ("RachisVersionSkew", WARNING, _complains("versions")),
    ("RachisBlocksQuarantined", WARNING, _complains("quarantine")),
    ("RachisClockSkew", WARNING, _clocks),
    ("RachisQueueGrowing", WARNING, _queue_growing),
    ("RachisTtftObjectiveMissed", WARNING, _ttft),
    ("RachisIndexStale", WARNING, _index_complains("stale")),
    ("RachisWorkerSilent", WARNING, _index_complains("silent")),
    ("RachisWorkerNotInSync", WARNING, _index_complains("behind")),
    ("RachisIndexLagging", WARNING, _lag),
)


def alerts_of(sight: Sight) -> list[admin.Alert]:
    return [
        admin.Alert(
            name=name,
            severity=severity,
            subject=wrong.subject,
            sentence=wrong.sentence,
            runbook=f"docs/runbooks/{name}.md",
        )
        for name, severity, looks in LOOKS
        for wrong in looks(sight)
    ]
