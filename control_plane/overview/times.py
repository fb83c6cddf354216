"""What requests of late took until their first token, and for each token after it, beside the objectives. Pure.

Of those that somebody waits for: best effort has objectives of its own, and its figures among the metrics. What is
resumed began elsewhere, and has no times here.

Read off the traces that have ended, so that a request costs nothing more for it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from rachis.v1 import admin_pb2 as admin

from cluster_core.objectives import RequestClass, class_of
from control_plane.model.request_trace import RequestTrace

WINDOW_S = 60.0
MOST_REQUESTS = 2000
# Of all requests, that objectives are meant for.
SHARE = 0.9


@dataclass(frozen=True, slots=True)
class RecentTimes:
    """In seconds, ascending."""

    ttft_s: Sequence[float]
    tpot_s: Sequence[float]


def recent_times(ended: Iterator[RequestTrace], now_s: float) -> RecentTimes:
    """ended: the last one to end first. now_s: on the clock of traces."""
    ttft_s: list[float] = []
    tpot_s: list[float] = []
    awaited = (each for each in ended if class_of(each.priority) is RequestClass.INTERACTIVE and not each.is_resumed)
    for trace in islice(awaited, MOST_REQUESTS):
        if trace.ended_s is None or trace.ended_s < now_s - WINDOW_S:
            break
        if trace.ttft_s is not None:
            ttft_s.append(trace.ttft_s)
        tokens = trace.answered.completion_tokens if trace.answered is not None else 0
        if trace.first_token_s is not None and tokens > 1:
            tpot_s.append((trace.ended_s - trace.first_token_s) / (tokens - 1))
    return RecentTimes(sorted(ttft_s), sorted(tpot_s))


def times_overview(ascending_s: Sequence[float], objective_s: float) -> admin.TimesOverview:
    return admin.TimesOverview(
        requests=len(ascending_s),
        p50_s=quantile(ascending_s, 0.5),
        p90_s=quantile(ascending_s, SHARE),
        objective_s=objective_s,
    )


def quantile(ascending: Sequence[float], share: float) -> float | None:
    """None: there is nothing."""
    return ascending[int(share * (len(ascending) - 1))] if ascending else None
