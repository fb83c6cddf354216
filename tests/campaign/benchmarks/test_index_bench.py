"""`rachis bench index`: what is in the index, what is timed, and what is printed."""

import json
from typing import Any

import pytest

from benchmarks import index as bench
from command_line.bench import index_run
from kv_transfer.claims.claims import decode_batch
from tests.command import handed_over, rachis

SMALL = bench.Sizes(prompts=5, decisions=20, batches=10, least_entries=2000)


def test_the_index_is_full_of_true_claims_and_every_prompt_has_a_whole_holder() -> None:
    world = bench.IndexWorld(20_000, 4, seed=1, sizes=SMALL)
    told: list[int] = []
    world.fill(20_000, told.append)
    assert world.index.entries >= 20_000 > world.index.entries - 8 * bench.BATCH_KEYS
    assert sum(told) > 10_000
    world.prepare_lookups()
    for keys in world.hashed:
        assert len(keys) == bench.PROMPT_TOKENS // bench.CHUNK_TOKENS
        assert world.index.lookup(keys).device.max() == len(keys)
    world.index.check_invariants()


def test_a_decision_goes_to_the_whole_holder_and_leaves_nothing_in_flight() -> None:
    world = bench.IndexWorld(20_000, 4, seed=1, sizes=SMALL)
    world.fill(20_000, lambda more: None)
    for _ in range(10):
        world.ask()
        world.decide()
        placement = world.placement
        assert placement is not None and placement.work.uncomputed_tokens == 1
        world.account()
    assert all(member.in_flight_requests == 0 for member in world.membership.members())


def test_batches_are_worth_what_they_are_counted_as() -> None:
    world = bench.IndexWorld(20_000, 4, seed=1, sizes=SMALL)
    batches = world.batches()
    assert len(batches) == SMALL.batches
    sizes = [len(decode_batch(data).change) for _, data in batches]
    assert sizes == [bench.BATCH_KEYS, 2 * bench.BATCH_KEYS] * (SMALL.batches // 2)


def test_options_say_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = handed_over(monkeypatch, index_run, "bench_index")
    assert rachis("bench", "index", "--blocks", "200000", "--workers", "3", "--sweep", "--json").exit_code == 0
    assert measured == [(200_000, 3, 0, {"sweep": True, "as_json": True})]


def test_the_command_prints_the_figures_that_were_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    index_run.bench_index(200_000, 3, 0, sweep=True, as_json=True, sizes=SMALL)
    told: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
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
