"""The measurement of what encryption costs, on its real processes, small: that it measures, not what."""

from benchmarks import encryption


async def test_routers_with_a_secret_and_without_are_asked_in_turns() -> None:
    said: list[str] = []

    wish = encryption.Wish(rounds=1, requests=6, concurrency=2, prompt_tokens=32, new_tokens=4)
    found = await encryption.measure(wish, said.append)

    assert found["plain"]["end_to_end_ms"] >= found["plain"]["ttft_ms"] > 0
    for arm in ("again", "encrypted"):
        assert found[arm]["ttft"]["median"] > 0 and found[arm]["end_to_end"]["median"] > 0
    assert len(said) == 1
