"""A collector that takes spans over OTLP on threads of its own, whatever loop a test runs on, and keeps them."""

import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_grpc

# However a test ends, its process does.
_LONGEST_HANG_S = 300.0
_CALLS = 16


class Collector(otlp_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.url = ""
        # Who has waited for an answer that did not come.
        self.kept: set[str] = set()
        self._answers = threading.Event()
        self._answers.set()

    @contextmanager
    def hanging(self) -> Iterator[None]:
        """Within, it takes calls and answers none."""
        self._answers.clear()
        try:
            yield
        finally:
            self._answers.set()

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        if not self._answers.is_set():
            self.kept.add(context.peer())
            self._answers.wait(_LONGEST_HANG_S)
            return otlp.ExportTraceServiceResponse()
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)
        return otlp.ExportTraceServiceResponse()

    def named(self, name: str, trace_id: str) -> list[Any]:
        """Spans of that name in that trace, whose id is hexadecimal."""
        return [span for span in self.spans if span.name == name and span.trace_id.hex() == trace_id]


@contextmanager
def listening() -> Iterator[Collector]:
    collector = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(_CALLS))
    otlp_grpc.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    collector.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait()
