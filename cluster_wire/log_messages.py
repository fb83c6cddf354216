"""Log events and what is asked of them, as messages."""

from collections.abc import Iterable

from rachis.v1 import worker_pb2 as wire

from cluster_core.event_log import LogEvent
from cluster_core.log_files import LogQuery

_FIELDS = ("unix_ms", "level", "process", "logger", "message", "request_id", "trace_id", "exception")


def events_to_wire(events: Iterable[LogEvent]) -> list[wire.LogEvent]:
    return [wire.LogEvent(**{name: getattr(event, name) for name in _FIELDS}) for event in events]


def event_from_wire(event: wire.LogEvent) -> LogEvent:
    """Without its service, which is the one that was asked."""
    return LogEvent(service="", **{name: getattr(event, name) for name in _FIELDS})


def query_from_wire(query: wire.LogQuery) -> LogQuery:
    return LogQuery(query.request_id, query.level, query.since_unix_ms, query.most_events)
