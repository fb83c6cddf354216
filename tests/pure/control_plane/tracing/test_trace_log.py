"""Which traces are remembered, whose they are, and which are exported."""

from random import Random

import pytest
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import generation_pb2 as generation

from cluster_core.ids import RequestId
from cluster_core.objectives import RequestClass
from control_plane.model.lifecycle import RequestLifecycle
from control_plane.model.request_trace import Answered, ParentSpan, RequestTrace
from control_plane.tracing.told import MOST_LISTED, listed
from control_plane.tracing.trace_log import TraceLog, found, trace_bytes
from control_plane.tracing.traceparent import parent_of, parsed, written
from control_plane.tracing.traces import TraceRules, Traces


def ended(name: str, at_s: float, tenant: str = "a") -> RequestTrace:
    trace = RequestTrace(request_id=name, tenant=tenant, trace_id=int(at_s) + 1)
    trace.begin(at_s - 1)
    trace.end(at_s, "finished")
    return trace


def test_notable_ones_are_not_pushed_out_by_the_others() -> None:
    log = TraceLog(20 * trace_bytes(ended("x", 1.0)))
    log.add(ended("failed", 1.0), is_notable=True)
    for number in range(100):
        log.add(ended(f"plain-{number}", 2.0 + number), is_notable=False)
    names = [trace.request_id for trace in log.latest()]
    assert names == [*(f"plain-{number}" for number in range(99, 89, -1)), "failed"]
    assert log.memory().used_bytes <= 20 * trace_bytes(ended("x", 1.0))


def test_a_trace_is_found_by_id_by_its_beginning_and_by_its_own_id_and_by_its_tenant_alone() -> None:
    traces = [ended("request-10", 3.0), ended("request-1", 2.0), ended("other", 1.0, tenant="b")]

    def name_of(name: str, tenant: str | None) -> str | None:
        trace = found(iter(traces), name, tenant)
        return None if trace is None else trace.request_id

    assert name_of("request-1", "a") == "request-1", "whose id it is goes before those that begin with it"
    assert name_of("req", "a") == name_of("", "a") == "request-10"
    assert name_of(f"{2:032x}", None) == "other"
    assert name_of("other", "a") is None and name_of("other", "b") == "other" and name_of("nobody", None) is None


class Collector:
    """Takes what it is offered."""

    exported = 0
    dropped: dict[str, int] = {}  # noqa: RUF012

    def __init__(self) -> None:
        self.offered: list[str] = []

    def offer(self, trace: RequestTrace, arrived_unix_s: float) -> None:
        self.offered.append(trace.request_id)

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("ttft_s", "priority", "is_sampled", "is_exported"),
    [
        (0.5, 0, False, False), (2.0, 0, False, True), (0.5, 0, True, True),
        # Best effort has an objective of its own.
        (2.0, 1, False, False), (9.0, 1, False, True),
    ],
)  # fmt: skip
def test_exported_are_those_drawn_and_those_that_missed_the_objective(
    ttft_s: float, priority: int, is_sampled: bool, is_exported: bool
) -> None:
    now_s, collector = 5.0, Collector()
    rules = TraceRules(0.0, {RequestClass.INTERACTIVE: 1.0, RequestClass.BEST_EFFORT: 8.0})
    traces = Traces(None, rules, collector, Random(1), lambda: now_s, lambda: 1000.0 + now_s)
    lifecycle = RequestLifecycle("r")  # type: ignore[arg-type]
    traces.begin(lifecycle, "request", ParentSpan(7, 9, is_sampled))
    assert traces.find("r", None) is lifecycle.trace, "it is found while it runs"
    lifecycle.trace.priority = priority
    now_s += ttft_s
    lifecycle.trace.has_token(now_s)
    traces.end(lifecycle)
    assert collector.offered == (["r"] if is_exported else [])
    assert lifecycle.trace.is_exported is is_exported and lifecycle.trace.trace_id == 7
    assert traces.arrived_unix_s(lifecycle.trace) == 1005.0


@pytest.mark.parametrize("kind", ["resumed", "session"])
def test_what_went_on_here_missed_no_objective_here(kind: str) -> None:
    trace = RequestTrace(kind=kind, first_token_s=9.0)
    rules = TraceRules(0.0, {RequestClass.INTERACTIVE: 1.0})
    trace.answered = Answered(8, 0, 100, generation.Route(resumed_tokens=90 if kind == "session" else 0))
    assert not rules.is_notable(trace)
    trace.end(10.0, "failed")
    assert rules.is_notable(trace)


def test_requests_are_listed_oldest_first_and_never_more_than_the_bound() -> None:
    now_s = 0.0
    traces = Traces(now_s=lambda: now_s)
    for number in range(2 * (MOST_LISTED + 50)):
        lifecycle, now_s = RequestLifecycle(RequestId(f"r{number}")), now_s + 1
        traces.begin(lifecycle, "request", None)
        lifecycle.trace.tenant = "a" if number else "b"
        if number % 2:
            traces.end(lifecycle)

    told = listed(traces, admin.ListRequestsRequest(running=10_000, ended=10_000), None)
    assert (len(told.running), len(told.ended), told.running_total) == (MOST_LISTED, MOST_LISTED, MOST_LISTED + 50)
    assert [view.request_id for view in told.running[:2]] == ["r0", "r2"]
    assert told.ended[0].request_id == f"r{2 * (MOST_LISTED + 50) - 1}"

    told = listed(traces, admin.ListRequestsRequest(running=1), "a")
    assert [view.request_id for view in told.running] == ["r2"] and not told.ended
    assert told.running_total == MOST_LISTED + 49, "another tenant's is not counted"


def test_a_traceparent_is_read() -> None:
    parent = ParentSpan(0xABC, 0xDEF, is_sampled=True)
    text = f"00-{0xABC:032x}-{0xDEF:016x}-01"
    assert parsed(text) == parent and written(parent) == text
    assert parent_of([("x", "y"), ("traceparent", text)]) == parent
    assert parent_of([("traceparent", text)] * 2) is None, "who is meant is not known"


@pytest.mark.parametrize(
    "wrong",
    ["", "00", "00-0-1-01", f"ff-{1:032x}-{1:016x}-01", f"00-{0:032x}-{1:016x}-01", f"00-{1:032x}-{0:016x}-01",
     f"00-{1:032x}-{1:016x}-01-more", f"00-{1:032X}G-{1:016x}-01", "00-" + "A" * 32 + f"-{1:016x}-01"],
)  # fmt: skip
def test_a_malformed_traceparent_counts_as_none(wrong: str) -> None:
    assert parsed(wrong) is None
