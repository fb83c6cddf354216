"""When the requests of a workload arrive, and whose they are, where the settings say so."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from cluster_sim.workloads.requests import SimRequest, block_names
from cluster_sim.workloads.section import STREAMS, WorkloadSection

# Their requests have times of their own.
_TIMED = ("trace", "azure", "agents", *STREAMS)


def timed(requests: Iterator[SimRequest], settings: WorkloadSection, seed: int) -> Iterator[SimRequest]:
    """Arrivals as the settings say; in the order of the trace. A trace's clock that ticks coarsely is spread."""
    rng = random.Random(f"arrivals/{seed}")
    if settings.kind in STREAMS or (settings.arrivals == "trace" and settings.kind in _TIMED):
        for each in requests if settings.kind in STREAMS else _spread(requests, rng):
            yield _at(each, each.arrival_s / settings.speed)
        return
    shape = 1.0 if settings.arrivals != "bursty" else 1 / settings.burstiness**2
    now_s = 0.0
    for each in requests:
        yield _at(each, now_s)
        now_s += rng.gammavariate(shape, 1 / (shape * settings.requests_per_s))


def of_tenants(requests: Iterator[SimRequest], settings: WorkloadSection, seed: int) -> Iterator[SimRequest]:
    if settings.tenants <= 1:
        yield from requests
        return
    rng = random.Random(f"tenants/{seed}")
    # A few tenants bring most requests (Zipf).
    weights = [1 / rank for rank in range(1, settings.tenants + 1)]
    for each in requests:
        number = rng.choices(range(settings.tenants), weights)[0]
        keys = block_names(each.keys ^ np.uint64(number + 1))
        yield replace(each, keys=keys, tenant=f"tenant-{number}")


def _spread(requests: Iterator[SimRequest], rng: random.Random) -> Iterator[SimRequest]:
    """Requests of one tick are spread evenly at random until the next one, in their order."""
    first_s: float | None = None
    tick: list[SimRequest] = []
    for each in itertools.chain(requests, [None]):
        if each is not None and (not tick or each.arrival_s == tick[0].arrival_s):
            tick.append(each)
            continue
        if not tick:
            return
        start_s = tick[0].arrival_s
        first_s = start_s if first_s is None else first_s
        length_s = (each.arrival_s - start_s) if each is not None else 0.0
        for request, share in zip(tick, sorted(rng.random() for _ in tick), strict=True):
            spread_s = share * length_s if len(tick) > 1 else 0.0
            yield _at(request, start_s - first_s + spread_s)
        tick = [each] if each is not None else []


def _at(request: SimRequest, arrival_s: float) -> SimRequest:
    return replace(request, arrival_s=arrival_s, output_tokens=max(1, request.output_tokens))
