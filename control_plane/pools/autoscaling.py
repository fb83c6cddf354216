"""When a pool grows or shrinks by itself: pure, fed with samples, by one worker at a time.

It grows when for `grow_after_s` too much waits, or the TTFT objective is missed in a pool of whose workers more than
`shrink_below` compute: what an idle worker takes too long for takes two as long. It shrinks when for `shrink_after_s` a
worker less would have been enough. Between the two lies a wide band where nothing happens, both clocks start anew after
every change, and a pool does not grow while a worker is still on its way: it does not swing. Ray's own autoscaler
follows the pool's size: it adds a node for a worker that finds no room, and takes idle nodes away.
"""

from dataclasses import dataclass

from cluster_configs.schema import AutoscaleSection


@dataclass(frozen=True, slots=True)
class PoolSample:
    """A pool at one moment.

    desired, ready, coming: workers wanted, those that take requests, and those that start or wait for room and may yet
    come. waiting: requests that wait for workers, in the router's queue and in the pool's engines. usage: share of the
    capacity of the ready workers that is in use, 0 to 1. computing: share of these that compute anything. ttft_s: what
    90% of the requests of late kept, None where there were too few; only for a pool that answers for it.
    """

    desired: int
    ready: int
    coming: int
    waiting: int
    usage: float
    computing: float
    ttft_s: float | None = None


class Autoscaler:
    """Of one pool. `decide` is called with every sample, in order of time."""

    def __init__(self, settings: AutoscaleSection, ttft_objective_s: float) -> None:
        self._settings = settings
        self._ttft_objective_s = ttft_objective_s
        self._short_since_s: float | None = None
        self._ample_since_s: float | None = None

    def decide(self, now_s: float, sample: PoolSample) -> int:
        """Workers that the pool should have; `sample.desired` where nothing is to change."""
        settings = self._settings
        wanted = min(max(sample.desired, settings.min_workers), settings.max_workers)
        if wanted != sample.desired:
            self.begin_anew()
            return wanted
        self._short_since_s = _since(self._short_since_s, now_s, holds=self._is_short(sample) and not sample.coming)
        self._ample_since_s = _since(self._ample_since_s, now_s, holds=self._is_ample(sample))
        if _lasts(self._short_since_s, now_s, settings.grow_after_s) and wanted < settings.max_workers:
            self.begin_anew()
            return wanted + 1
        if _lasts(self._ample_since_s, now_s, settings.shrink_after_s) and wanted > settings.min_workers:
            self.begin_anew()
            return wanted - 1
        return wanted

    def begin_anew(self) -> None:
        """Both clocks."""
        self._short_since_s = self._ample_since_s = None

    def _is_short(self, sample: PoolSample) -> bool:
        is_late = self._is_late(sample) and sample.computing > self._settings.shrink_below
        return is_late or sample.waiting > self._settings.waiting_per_worker * sample.ready

    def _is_late(self, sample: PoolSample) -> bool:
        return sample.ttft_s is not None and sample.ttft_s > self._ttft_objective_s

    def _is_ample(self, sample: PoolSample) -> bool:
        # Who is not ready leaves first, and takes nothing away from the others.
        left = sample.ready - (sample.ready == sample.desired)
        if left < 1 or sample.waiting or self._is_late(sample):
            return False
        return sample.usage * sample.ready / left <= self._settings.shrink_below


def _since(began_s: float | None, now_s: float, *, holds: bool) -> float | None:
    if not holds:
        return None
    return now_s if began_s is None else began_s


def _lasts(began_s: float | None, now_s: float, at_least_s: float) -> bool:
    return began_s is not None and now_s - began_s >= at_least_s
