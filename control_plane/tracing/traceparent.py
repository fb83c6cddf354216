"""The `traceparent` of W3C Trace Context: whose span a call belongs to. Pure.

What is malformed counts as absent, as the recommendation asks for: its sender's trace goes on without this service.
"""

import re
from collections.abc import Iterable

from control_plane.model.request_trace import ParentSpan

# Of the metadata of a call, and of an HTTP request.
TRACEPARENT = "traceparent"
# Later versions may have more fields behind these.
_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_NO_VERSION = "ff"
_SAMPLED = 1


def parsed(value: str) -> ParentSpan | None:
    """None for what is none."""
    found = _FORM.fullmatch(value)
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == _NO_VERSION or (version == "00" and more) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    return ParentSpan(int(trace_id, 16), int(span_id, 16), bool(int(flags, 16) & _SAMPLED))


def written(span: ParentSpan) -> str:
    """As `parsed` reads it."""
    return f"00-{span.trace_id:032x}-{span.span_id:016x}-{int(span.is_sampled):02x}"


def parent_of(metadata: Iterable[tuple[str, str | bytes]]) -> ParentSpan | None:
    """Of a call's metadata. None where it brings none, or several."""
    given = [value for key, value in metadata if key == TRACEPARENT]
    return parsed(given[0]) if len(given) == 1 and isinstance(given[0], str) else None
