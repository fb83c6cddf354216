"""Spans to a collector over OTLP, by OpenTelemetry's exporter. The only module that imports its SDK."""

import importlib.metadata
from collections.abc import Callable, Sequence
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from control_plane.tracing.spans import Span

_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


def connected(endpoint: str, protocol: str, timeout_s: float) -> Callable[[Sequence[Span]], bool]:
    """What sends spans there, and says whether they were taken. Nothing is called before spans are."""
    exporter = _exporter(endpoint, protocol, timeout_s)
    version = importlib.metadata.version("rachis")
    resource = Resource.create({"service.name": "rachis", "service.version": version})
    scope = InstrumentationScope("rachis", version)

    def send(spans: Sequence[Span]) -> bool:
        told = [_readable(span, resource, scope) for span in spans]
        return exporter.export(told) is SpanExportResult.SUCCESS

    return send


def _exporter(endpoint: str, protocol: str, timeout_s: float) -> SpanExporter:
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

        return Grpc(endpoint, insecure=endpoint.startswith("http://"), timeout=timeout_s)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http

    return Http(endpoint, timeout=timeout_s)


def _readable(span: Span, resource: Resource, scope: InstrumentationScope) -> ReadableSpan:
    attributes: Any = span.attributes
    return ReadableSpan(
        span.name,
        context=_context(span.trace_id, span.span_id, is_remote=False),
        parent=_context(span.trace_id, span.parent_id, is_remote=span.is_root) if span.parent_id else None,
        resource=resource,
        attributes=attributes,
        events=[Event(each.name, each.attributes, _ns(each.unix_s)) for each in span.events],
        links=[Link(_context(*span.link, is_remote=True))] if span.link is not None else (),
        kind=SpanKind.SERVER if span.is_root else SpanKind.INTERNAL,
        instrumentation_scope=scope,
        status=Status(StatusCode.ERROR, span.failure) if span.failure else Status(StatusCode.UNSET),
        start_time=_ns(span.began_unix_s),
        end_time=_ns(span.ended_unix_s),
    )


def _context(trace_id: int, span_id: int, *, is_remote: bool) -> SpanContext:
    return SpanContext(trace_id, span_id, is_remote=is_remote, trace_flags=_SAMPLED)


def _ns(unix_s: float) -> int:
    return round(unix_s * 1e9)
