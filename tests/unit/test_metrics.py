import urllib.request

from rachis.v1 import generation_pb2 as generation

from control_plane.metrics import RouterMetrics

RECORD = generation.SessionRecord(
    tokens=generation.SessionProgress(
        received_tokens=300, computed_tokens=250, reused_tokens=50, invalidated_tokens=20
    ),
    preemptions_swap=2,
    preemptions_recompute=1,
    events=[generation.SessionEvent(kind=generation.SESSION_EVENT_KIND_PREEMPTED_SWAP, at_ms=40.0, tokens=96)],
    ttft_from_open_ms=1200.0,
    ttft_from_finish_ms=30.0,
)


def test_a_session_is_observed_from_its_opening_and_from_its_finish() -> None:
    metrics = RouterMetrics()
    metrics.session_ended(RECORD)
    sample = metrics.registry.get_sample_value
    assert sample("rachis_session_ttft_seconds_sum", {"since": "open"}) == 1.2
    assert sample("rachis_session_ttft_seconds_sum", {"since": "finish"}) == 0.03
    assert sample("rachis_session_event_seconds_sum", {"event": "preempted_swap"}) == 0.04
    assert sample("rachis_session_tokens_sum", {"outcome": "invalidated"}) == 20
    assert sample("rachis_session_preemptions_total", {"strategy": "swap"}) == 2
    assert sample("rachis_session_preemptions_total", {"strategy": "recompute"}) == 1


def test_the_endpoint_shows_outcomes_and_refusals() -> None:
    metrics = RouterMetrics()
    metrics.request_ended("finished")
    metrics.refused("OUT_OF_RANGE")
    metrics.serve("127.0.0.1", 0)
    try:
        with urllib.request.urlopen(f"http://{metrics.address}/metrics", timeout=5) as response:
            text = response.read().decode()
    finally:
        metrics.close()
    assert 'rachis_requests_total{outcome="finished"} 1.0' in text
    assert 'rachis_session_refusals_total{status="OUT_OF_RANGE"} 1.0' in text


def test_two_routers_count_apart() -> None:
    first, second = RouterMetrics(), RouterMetrics()
    first.request_ended("finished")
    assert second.registry.get_sample_value("rachis_requests_total", {"outcome": "finished"}) is None
