"""What the scheduler reports of a session."""

import pytest

from cluster_core.engine_jobs import SessionEventKind
from prefill_worker.streaming_request import PARKED
from tests.campaign.fuzz.simulated_engine import SteppedClock
from tests.integration.streaming_scheduler.sessions import MakeEngine, park, request, session_tokens, text, until

pytestmark = pytest.mark.integration


def test_the_record_counts_tokens_exactly(make_engine: MakeEngine) -> None:
    engine = make_engine(token_budget=64)
    park(engine, "s", text("a", 100))
    engine.scheduler.extend_prompt("s", text("b", 50))
    until(engine, lambda: request(engine, "s").status is PARKED)
    progress = session_tokens(engine, "s")
    assert (progress.received_tokens, progress.computed_tokens, progress.ready_tokens) == (150, 149, 149)
    engine.scheduler.replace_prompt("s", text("a", 64) + text("c", 36))
    until(engine, lambda: request(engine, "s").status is PARKED)
    engine.scheduler.close_input("s", text("d", 10))
    engine.drain()
    counted = engine.records["s"].tokens
    assert counted.received_tokens == 100 + 50 + 100 + 10
    assert counted.computed_tokens == 99 + 50 + 35 + 11
    assert counted.invalidated_tokens == 149 - 64
    assert counted.reused_tokens == 64, "what the update left as it was"
    assert (counted.prompt_tokens, counted.ready_tokens, counted.inputs) == (110, 110, 2)


def test_what_the_prefix_cache_has_counts_as_reused(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add("before", text("a", 100))
    engine.drain()
    engine.open("s", text("a", 100))
    engine.scheduler.close_input("s", text("b", 10))
    engine.drain()
    counted = engine.records["s"].tokens
    assert (counted.reused_tokens, counted.computed_tokens) == (96, 14)


def test_events_come_in_the_order_of_what_happened(make_engine: MakeEngine, clock: SteppedClock) -> None:
    engine = make_engine(blocks=16)

    def later() -> bool:
        clock.advance(0.5)
        return True

    park(engine, "s", text("a", 180))
    later()
    engine.add("complete", text("b", 200))
    until(engine, lambda: later() and "complete" in engine.answers)
    engine.scheduler.replace_prompt("s", text("a", 100) + text("c", 20))
    until(engine, lambda: later() and request(engine, "s").status is PARKED)
    engine.scheduler.close_input("s", [1])
    engine.drain()
    events = engine.records["s"].events
    kind = SessionEventKind
    assert [event.kind for event in events] == [
        kind.QUEUED,
        kind.SCHEDULED,
        kind.KV_ON_DEVICE,
        kind.PREEMPTED_SWAP,
        kind.INVALIDATED,
        kind.QUEUED,
        kind.SCHEDULED,
        kind.RESUMED,
        kind.KV_ON_DEVICE,
        kind.QUEUED,
        kind.SCHEDULED,
        kind.FINISHED,
    ]
    assert [event.at_s for event in events] == sorted(event.at_s for event in events)
    assert events[0].at_s == 0.0
    assert [event.tokens for event in events if event.kind is kind.PREEMPTED_SWAP] == [179]
    assert [event.tokens for event in events if event.kind is kind.INVALIDATED] == [79]


def test_the_record_of_an_aborted_session_is_not_kept(make_engine: MakeEngine) -> None:
    engine = make_engine()
    park(engine, "s", text("a", 50))
    engine.abort("s")
    engine.drain()
    assert engine.scheduler.take_session_record("s") is None
