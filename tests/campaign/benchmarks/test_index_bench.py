"""`rachis bench index`: what is in the index, what is timed, and what is printed."""

import json
from typing import Any

import pytest

from benchmarks import index as bench
from kv_transfer.claims.claims import decode_batch
from tests.command import rachis


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"_PROMPTS": 5, "_DECISIONS": 20, "_BATCHES": 10, "LEAST_ENTRIES": 2000}.items():
        monkeypatch.setattr(bench, name, value)


def test_the_index_is_full_of_true_claims_and_every_prompt_has_a_whole_holder(small: None) -> None:
    world = bench.IndexWorld(20_000, 4, seed=1)
    told: list[int] = []
    world.fill(20_000, told.append)
    assert world.index.entries >= 20_000 > world.index.entries - 8 * bench._BATCH_KEYS
    assert sum(told) > 10_000
    world.prepare_lookups()
    for keys in world._hashed:
        assert len(keys) == bench.PROMPT_TOKENS // bench.CHUNK_TOKENS
        assert world.index.lookup(keys).device.max() == len(keys)
    world.index.check_invariants()


def test_a_decision_goes_to_the_whole_holder_and_leaves_nothing_in_flight(small: None) -> None:
    world = bench.IndexWorld(20_000, 4, seed=1)
    world.fill(20_000, lambda more: None)
    for _ in range(10):
        world.ask()
        world.decide()
        placement = world._placement
        assert placement is not None and placement.work.uncomputed_tokens == 1
        world.account()
    assert all(member.in_flight_requests == 0 for member in world._membership.members())


def test_batches_are_worth_what_they_are_counted_as(small: None) -> None:
    world = bench.IndexWorld(20_000, 4, seed=1)
    batches = world.batches()
    assert len(batches) == bench._BATCHES
    sizes = [len(decode_batch(data).change) for _, data in batches]
    assert sizes == [bench._BATCH_KEYS, 2 * bench._BATCH_KEYS] * (bench._BATCHES // 2)


def test_the_command_prints_the_figures_that_were_asked_for(small: None) -> None:
    result = rachis("bench", "index", "--blocks", "200000", "--workers", "3", "--sweep", "--json")
    assert result.exit_code == 0, result.output
    told: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    assert {"placement_p50_us", "placement_p99_us", "events_per_s", "bytes_per_entry"} <= told.keys()
    assert 0 < told["placement_p50_us"] <= told["placement_p99_us"]
    assert told["entries"] >= 200_000 and told["workers"] == 3
    assert [row["entries"] >= size for row, size in zip(told["by_entries"], (2000, 20_000, 200_000), strict=True)] == [
        True
    ] * 3
    assert [row["workers"] for row in told["by_workers"]] == [3, 6, 12]


def test_too_few_blocks_are_refused_in_a_sentence() -> None:
    result = rachis("bench", "index", "--blocks", "10")
    assert result.exit_code == 2 and "200000" in result.output
