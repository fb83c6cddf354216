"""How a service was in the last hour: a sample now and then, the oldest forgotten. Pure; `now_s` is monotonic."""

from collections import deque
from typing import NamedTuple

from rachis.v1 import admin_pb2 as admin

from control_plane.overview.rows import READY

INTERVAL_S = 5.0
_MOST_SAMPLES = 720


class _Taken(NamedTuple):
    at_s: float
    sample: admin.HistorySample


class History:
    """Of one router."""

    def __init__(self, most: int = _MOST_SAMPLES) -> None:
        self._taken: deque[_Taken] = deque(maxlen=most)

    def add(self, overview: admin.GetOverviewResponse, now_s: float) -> None:
        self._taken.append(_Taken(now_s, _sample(overview)))

    def told(self, now_s: float) -> admin.GetHistoryResponse:
        history = admin.GetHistoryResponse(interval_s=INTERVAL_S)
        for at_s, sample in self._taken:
            told = history.samples.add()
            told.CopyFrom(sample)
            told.age_s = now_s - at_s
        return history


def _sample(overview: admin.GetOverviewResponse) -> admin.HistorySample:
    sample = admin.HistorySample(
        pools=[_pool(pool) for pool in overview.pools],
        in_flight_requests=overview.router.in_flight_requests,
        queued_requests=overview.router.queued_requests,
    )
    if overview.ttft.requests:
        sample.ttft_p90_s = overview.ttft.p90_s
    if overview.tpot.requests:
        sample.tpot_p90_s = overview.tpot.p90_s
    return sample


def _pool(pool: admin.PoolOverview) -> admin.PoolSample:
    return admin.PoolSample(
        pool=pool.pool,
        desired_workers=pool.desired_workers if pool.HasField("desired_workers") else None,
        ready_workers=pool.workers.get(READY, 0),
        workers=sum(pool.workers.values()),
        running_requests=pool.running_requests,
        waiting_requests=pool.waiting_requests,
    )
