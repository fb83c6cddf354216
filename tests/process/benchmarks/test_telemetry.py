"""The measurement of what traces and logs cost, on its real processes, small: that it measures, not what."""

from benchmarks import telemetry


async def test_each_router_is_asked_and_those_that_are_drawn_are_exported() -> None:
    said: list[str] = []

    wish = telemetry.Wish(rounds=1, requests=6, concurrency=2, sample_rate=1.0, arms=("traces",))
    found = await telemetry.measure(wish, said.append)

    assert found["exported"] > 0
    assert 0 < found["traced_of_client_time"]["median"] <= 1
    assert found["off"]["end_to_end_ms"] >= found["off"]["ttft_ms"] > 0
    assert found["traces"]["end_to_end"]["median"] > 0
    assert found["recording_us"] > 0
    assert len(said) == 1
