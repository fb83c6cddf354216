"""Opens a workload: its requests one after the other by arrival, from a trace or drawn from a seed.

Any of them has the same form. Only what is running is held: memory does not grow with the length.
"""

import itertools
from collections.abc import Callable, Iterator

from cluster_core.errors import InvalidInputError
from cluster_sim.workloads import arrivals, recorded, sessions, synthetic
from cluster_sim.workloads.few_shot import SHAPES
from cluster_sim.workloads.requests import SimRequest, Workload
from cluster_sim.workloads.section import KINDS, STREAMS, WorkloadSection
from cluster_sim.workloads.traces import open_trace

# Traces aside.
_KINDS_DRAWN: dict[str, Callable[[WorkloadSection, int], Callable[[], Iterator[SimRequest]]]] = {
    "azure": recorded.azure,
    "conversation": synthetic.conversation,
    "prefix_groups": synthetic.prefix_groups,
    "prefix_tree": synthetic.prefix_tree,
    "agents": synthetic.agents,
    **dict.fromkeys(STREAMS, sessions.streams),
    **dict.fromkeys(SHAPES, recorded.few_shot),
}


def open_workload(settings: WorkloadSection, seed: int = 0) -> Workload:
    """Raises InvalidInputError, TraceError among it, for what cannot be."""
    _check(settings)
    if settings.kind == "trace":
        assert settings.file is not None
        trace = open_trace(settings.file, seed=seed)
        block_tokens, base = trace.block_tokens, recorded.of_trace(trace, settings.requests)
    else:
        block_tokens, base = settings.block_tokens, _KINDS_DRAWN[settings.kind](settings, seed)

    def requests() -> Iterator[SimRequest]:
        timed = arrivals.timed(arrivals.of_tenants(base(), settings, seed), settings, seed)
        return itertools.islice(timed, settings.requests) if settings.requests else timed

    return Workload(block_tokens, requests)


def _check(settings: WorkloadSection) -> None:
    if settings.kind not in KINDS:
        raise InvalidInputError(f"must be one of {', '.join(KINDS)}, got {settings.kind!r}", field="workload.kind")
    if settings.kind in ("trace", "azure") and settings.file is None:
        raise InvalidInputError("must name the trace", field="workload.file")
    if settings.kind not in ("trace", "azure") and not settings.requests:
        raise InvalidInputError("must be at least 1: a drawn workload has no end", field="workload.requests")
    if settings.requests_per_s <= 0 and (
        settings.kind not in ("trace", "azure", "agents") or settings.arrivals != "trace"
    ):
        raise InvalidInputError("must be above 0 where the arrivals are drawn", field="workload.requests_per_s")
    if settings.kind in STREAMS and settings.tenants > 1:
        raise InvalidInputError("must be 1: sessions have no tenants", field="workload.tenants")
