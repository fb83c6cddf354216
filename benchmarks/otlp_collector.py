"""A collector on loopback that takes spans over OTLP, counts them and keeps nothing."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_grpc


class CountingCollector(otlp_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.spans = 0
        # Spans of whole requests among them, by the name that the router gives them.
        self.requests = 0

    async def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        spans = [span for each in request.resource_spans for scope in each.scope_spans for span in scope.spans]
        self.spans += len(spans)
        self.requests += sum(span.name == "rachis.request" for span in spans)
        return otlp.ExportTraceServiceResponse()


@asynccontextmanager
async def listening(collector: otlp_grpc.TraceServiceServicer) -> AsyncIterator[str]:
    """The URL of the collector, on a port of its own."""
    server = grpc.aio.server()
    otlp_grpc.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await server.stop(None)
