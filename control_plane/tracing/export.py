"""Traces on their way to a collector, on a thread of their own: nothing waits for it.

What the collector is too slow for waits in a bounded queue; more is dropped and counted, and so is what it does not
take in time. OpenTelemetry's SDK is imported on that thread, and only where a collector is configured.
"""

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from random import Random

from rachis.v1 import admin_pb2 as admin

from cluster_configs.schema import TracingSection
from cluster_core.objectives import ObjectivesByClass
from control_plane.model.request_trace import RequestTrace
from control_plane.tracing.spans import EndedTrace, Span, spans_of
from control_plane.tracing.trace_log import TraceLog
from control_plane.tracing.traces import TraceRules, Traces

logger = logging.getLogger(__name__)

# Of placement, on a request of a tenant.
Decisions = Callable[[str, str], Sequence[admin.PlacementDecision]]
# Sends spans, in bounded time. Says whether the collector has taken them.
Send = Callable[[Sequence[Span]], bool]
# Traces in one message.
_MOST_AT_ONCE = 64
# Why traces are dropped.
QUEUE_FULL, NOT_TAKEN = "queue_full", "not_taken"


class TraceExporter:
    """connect: makes what sends, on the exporter's thread. Exports from its construction until `close`."""

    def __init__(self, connect: Callable[[], Send], decisions: Decisions, most_queued: int) -> None:
        self._connect = connect
        self._decisions = decisions
        self._queue: queue.Queue[EndedTrace | None] = queue.Queue(most_queued)
        self._rng = Random()
        # Written by one thread each.
        self.exported = 0
        self._not_taken = self._full = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> Mapping[str, int]:
        """By why."""
        return {QUEUE_FULL: self._full, NOT_TAKEN: self._not_taken}

    def offer(self, trace: RequestTrace, arrived_unix_s: float) -> None:
        """See `control_plane.tracing.traces.Exporter`."""
        if self._queue.full():
            self._full += 1
            return
        ended = EndedTrace(trace, arrived_unix_s, self._decisions(trace.request_id, trace.tenant))
        self._queue.put_nowait(ended)

    def close(self) -> None:
        """What waits is given up. Does not wait for the collector, whom the thread may wait for: it ends by itself."""
        self._is_closed = True
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            # The thread may have taken the last of it meanwhile.
            with suppress(queue.Empty):
                self._queue.get_nowait()
            self._queue.put_nowait(None)

    def _run(self) -> None:
        send: Send | None = None
        while not self._is_closed:
            batch = self._next_batch()
            if not batch:
                continue
            try:
                send = send or self._connect()
                is_taken = send([span for ended in batch for span in spans_of(ended, self._rng)])
            except Exception:
                # Of whatever the SDK or the collector does, traces are all that is lost.
                logger.exception("%d traces are dropped", len(batch))
                is_taken = False
            if is_taken:
                self.exported += len(batch)
            else:
                self._not_taken += len(batch)

    def _next_batch(self) -> list[EndedTrace]:
        """Waits for the first; empty: it was closed."""
        first = self._queue.get()
        batch = [] if first is None else [first]
        while batch and len(batch) < _MOST_AT_ONCE and not self._queue.empty():
            following = self._queue.get_nowait()
            if following is None:
                break
            batch.append(following)
        return batch


def traces_of(
    section: TracingSection, objectives: ObjectivesByClass, decisions: Decisions, now_s: Callable[[], float]
) -> Traces:
    """Of a router with this configuration."""
    exporter, endpoint = None, section.otlp_url
    if endpoint is not None:
        # Imported there: it takes long, and most services have no collector.
        def connect() -> Send:
            from control_plane.tracing.otlp import connected

            return connected(endpoint, section.otlp_protocol, section.timeout_s)

        exporter = TraceExporter(connect, decisions, section.queue_traces)
    slow_s = {whose: each.ttft_s for whose, each in objectives.items()}
    rules = TraceRules(section.sample_rate if exporter is not None else 0.0, slow_s)
    return Traces(TraceLog(section.memory_mib << 20), rules, exporter, now_s=now_s)
