"""A trace as spans: one for the request, one for each stage, one around the stages of a migration. Pure.

Names and attributes follow OpenTelemetry's conventions for generative AI where there is one, else they begin with
`rachis.`. Nothing of a prompt or of an answer is in them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from random import Random

from rachis.v1 import admin_pb2 as admin
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire

from control_plane.model.request_trace import Interval, RequestTrace, TraceStage

Value = str | int | float | bool | Sequence[str]
# Whose candidates a stage's are.
_POOLS = {TraceStage.PLACEMENT: wire.POOL_PREFILL, TraceStage.DECODE_PLACEMENT: wire.POOL_DECODE}


@dataclass(frozen=True, slots=True)
class SpanEvent:
    name: str
    unix_s: float
    attributes: Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class Span:
    """parent_id: 0 has none. link: (trace, span) of whom this was opened by, where it is no child of it."""

    name: str
    trace_id: int
    span_id: int
    parent_id: int
    began_unix_s: float
    ended_unix_s: float
    attributes: Mapping[str, Value]
    events: Sequence[SpanEvent] = ()
    link: tuple[int, int] | None = None
    # Of the request alone: it was asked for by somebody else.
    is_root: bool = False
    # Why it went wrong; empty where it did not.
    failure: str = ""


@dataclass(frozen=True, slots=True)
class EndedTrace:
    """What is exported. arrived_unix_s: by the router's host. decisions: of placement, as they were remembered."""

    trace: RequestTrace
    arrived_unix_s: float
    decisions: Sequence[admin.PlacementDecision] = field(default=())


def spans_of(ended: EndedTrace, rng: Random) -> Iterator[Span]:
    """rng: makes the ids of all spans but that of the request, which has its own."""
    trace = ended.trace
    child_of = trace.parent.span_id if trace.parent is not None and trace.kind != "session" else 0
    is_linked = trace.parent is not None and trace.kind == "session"
    yield _whole(ended, trace, f"rachis.{trace.kind}", trace.span_id, child_of, is_linked=is_linked)
    yield from _stages(ended, trace, trace.span_id, rng)
    for number, choice in enumerate(trace.choices, start=1):
        span_id = rng.getrandbits(64) or 1
        yield _whole(ended, choice, f"rachis.choice {number}", span_id, trace.span_id, is_linked=False)
        yield from _stages(ended, choice, span_id, rng)


def _whole(
    ended: EndedTrace, answer: RequestTrace, name: str, span_id: int, parent_id: int, *, is_linked: bool
) -> Span:
    trace = ended.trace
    parent = trace.parent
    return Span(
        name,
        trace.trace_id,
        span_id,
        parent_id,
        _unix_s(ended, answer.began_s),
        _unix_s(ended, answer.ended_s or answer.began_s),
        _attributes(trace, answer),
        [
            SpanEvent(event.name, _unix_s(ended, event.at_s), {"detail": event.detail} if event.detail else {})
            for event in sorted(answer.events)
        ],
        (parent.trace_id, parent.span_id) if parent is not None and is_linked else None,
        is_root=answer is trace,
        failure="" if answer.outcome in ("finished", "cancelled") else answer.outcome,
    )


def _attributes(trace: RequestTrace, answer: RequestTrace) -> dict[str, Value]:
    found: dict[str, Value] = {
        "gen_ai.request.id": trace.request_id,
        "rachis.outcome": answer.outcome,
        "rachis.tenant": trace.tenant,
        "rachis.migrations": answer.migrations,
    }
    if answer.ttft_s is not None:
        found["gen_ai.latency.time_to_first_token"] = answer.ttft_s
    if answer.answered is not None:
        prompt_tokens, cached_tokens, completion_tokens, route = answer.answered
        found |= {
            "gen_ai.usage.input_tokens": prompt_tokens,
            "gen_ai.usage.output_tokens": completion_tokens,
            "rachis.cached_tokens": cached_tokens,
            "rachis.prefill_worker": route.prefill_worker_id,
            "rachis.decode_worker": route.decode_worker_id,
            "rachis.handoff": generation.HandoffOutcome.Name(route.handoff).removeprefix("HANDOFF_OUTCOME_").lower(),
            "rachis.kv_bytes": route.kv_bytes,
            "rachis.kv_descriptors": route.kv_descriptors,
            "rachis.pulled_tokens": route.pulled_tokens,
        }
    return found


def _stages(ended: EndedTrace, answer: RequestTrace, parent_id: int, rng: Random) -> Iterator[Span]:
    intervals = list(answer.intervals(answer.ended_s or answer.began_s))
    attributes = dict(zip(map(id, intervals), _stage_attributes(intervals, ended.decisions), strict=True))
    for migrates, group in groupby(intervals, key=lambda each: each.migrates):
        stages, above = list(group), parent_id
        if migrates:
            above = rng.getrandbits(64) or 1
            pause = Interval(*stages[0])._replace(ended_s=stages[-1].ended_s)
            yield _span(ended, pause, "migration", above, parent_id, {})
        for each in stages:
            span_id = rng.getrandbits(64) or 1
            yield _span(ended, each, each.stage.value, span_id, above, attributes[id(each)])


def _span(
    ended: EndedTrace, stage: Interval, name: str, span_id: int, parent_id: int, attributes: Mapping[str, Value]
) -> Span:
    began_s, ended_s = _unix_s(ended, stage.began_s), _unix_s(ended, stage.ended_s)
    return Span(name, ended.trace.trace_id, span_id, parent_id, began_s, ended_s, attributes)


def _stage_attributes(
    intervals: Sequence[Interval], decisions: Sequence[admin.PlacementDecision]
) -> list[dict[str, Value]]:
    """Of each. Of many decisions the last ones are remembered, so that they are told from the last one on."""
    left = {pool: [each for each in decisions if each.pool == pool] for pool in _POOLS.values()}
    found: list[dict[str, Value]] = []
    for each in reversed(intervals):
        attributes: dict[str, Value] = {"rachis.worker": each.worker_id} if each.worker_id else {}
        if each.attempt:
            attributes["rachis.attempt"] = each.attempt
        pool = _POOLS.get(each.stage)
        if pool is not None and left[pool]:
            attributes |= _placed(left[pool].pop())
        found.append(attributes)
    return found[::-1]


def _placed(decision: admin.PlacementDecision) -> dict[str, Value]:
    return {
        "rachis.placement.policy": decision.policy,
        "rachis.placement.worker": decision.worker_id,
        "rachis.placement.candidates": [
            f"{each.worker_id} {each.score:.3f}" if each.passed else f"{each.worker_id} left out"
            for each in decision.candidates
        ],
    }


def _unix_s(ended: EndedTrace, at_s: float) -> float:
    return ended.arrived_unix_s + (at_s - ended.trace.began_s)
