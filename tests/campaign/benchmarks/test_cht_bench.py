"""`rachis bench cht`: what arrives, what is timed, what is printed, and what is refused."""

import gc
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cht.play import BATCH_REQUESTS, OPERATIONS, Costs, Play, best_of, play_all
from benchmarks.cht.published_hash_tree import PublishedHashTree
from benchmarks.cht.speed import Sizes, bytes_per_waiting_request, largest_to_smallest
from benchmarks.cht.workload import ChtWorkload, block_hash_lists, computed, reused, token_lists
from cluster_core.errors import ConfigError
from command_line.bench import cht_run
from decode_worker.chunk_hashes import ChunkHash
from decode_worker.chunked_hash_tree import Candidate, ChunkedHashTree
from tests.command import handed_over, rachis

SMALL = ChtWorkload(requests=200, tokens=640, groups=3, chunk_tokens=64)
HUNDRED = ChtWorkload(requests=100, tokens=640)


class CountingTree(ChunkedHashTree):
    """Notes what is called, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def insert(
        self, request_id: str, hashes: Sequence[ChunkHash], priority: int = 0, arrival: int | None = None
    ) -> None:
        assert not gc.isenabled()
        self.calls.append("insert")
        super().insert(request_id, hashes, priority, arrival)

    def find_best(self) -> Candidate | None:
        self.calls.append("find")
        return super().find_best()

    def add_to_batch(self, request_id: str) -> None:
        self.calls.append("add")
        assert self.active_requests < BATCH_REQUESTS
        super().add_to_batch(request_id)

    def finish(self, request_id: str) -> None:
        self.calls.append("finish")
        super().finish(request_id)


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


QUICK = Sizes(waiting=(20, 40), repeats=2, waiting_repeats=1, least_turns=1)


def bench(*arguments: object) -> Any:
    return rachis("bench", "cht", *arguments)


def printed(
    capsys: pytest.CaptureFixture[str], workload: ChtWorkload = HUNDRED, sizes: Sizes = QUICK
) -> dict[str, Any]:
    cht_run.bench_cht(workload, None, as_json=True, sizes=sizes)
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


# What arrives.


def test_prompts_of_a_group_share_nine_tenths_and_no_object() -> None:
    prompts = list(islice(token_lists(SMALL), 60))
    assert {len(prompt) for prompt in prompts} == {640}
    prefixes = {tuple(prompt[:576]) for prompt in prompts}
    assert len(prefixes) == 3
    assert len({tuple(prompt[576:]) for prompt in prompts}) == 60
    same = [prompt for prompt in prompts if prompt[:576] == prompts[0][:576]]
    large = next(index for index, token in enumerate(same[0][:576]) if token > 256)
    assert same[0][large] is not same[1][large]


def test_block_hashes_part_in_the_block_in_which_the_prefix_ends() -> None:
    workload = replace(SMALL, tokens=1000)
    prompts = list(islice(block_hash_lists(workload), 60))
    assert {len(prompt) for prompt in prompts} == {31}
    assert len({tuple(prompt[:28]) for prompt in prompts}) == 3
    assert len({prompt[28] for prompt in prompts}) == 60
    assert len(prompts[0][0]) == 32


def test_a_seed_gives_the_same_requests() -> None:
    for kind in (token_lists, block_hash_lists):
        first, again, other = (list(islice(kind(replace(SMALL, seed=seed)), 5)) for seed in (1, 1, 2))
        assert first == again != other


def test_chunks_of_reused_hashes_are_whole_blocks() -> None:
    for chunk_tokens, chunks in ((32, 20), (50, 10), (64, 10), (65, 6)):
        prompts, hashes_of = reused(replace(SMALL, chunk_tokens=chunk_tokens))
        assert len(hashes_of(next(prompts))) == chunks


# What is timed.


@pytest.mark.parametrize("finds", [1.0, 1.1, 5.3, 8.0])
def test_each_request_is_inserted_found_so_often_added_and_finished(no_collector: None, finds: float) -> None:
    tree, workload = CountingTree(), replace(SMALL, finds=finds)
    play_all(tree, computed(workload), workload)
    counts = Counter(tree.calls)
    assert counts["insert"] == counts["add"] == counts["finish"] == SMALL.requests
    assert counts["find"] == pytest.approx(finds * SMALL.requests, abs=1)
    assert tree.active_requests == tree.waiting_requests == 0
    assert all(before == "find" for before, what in pairwise(tree.calls) if what == "add")


def test_the_batch_carries_over_and_is_bounded(no_collector: None) -> None:
    tree = CountingTree()
    play = Play(tree, reused(SMALL), SMALL)
    for _ in range(150):
        play.insert()
    for admitted in range(1, 100):
        play.admit()
        assert tree.active_requests == min(admitted, BATCH_REQUESTS)
    tree.check_invariants()


def test_both_trees_go_the_same_way() -> None:
    """Whom the best ones are is compared elsewhere; here that one workload serves both."""
    for tree in (ChunkedHashTree(), PublishedHashTree()):
        costs = play_all(tree, reused(SMALL), SMALL)
        assert min(costs.figures().values()) > 0


def test_means_are_over_the_calls_of_each_operation() -> None:
    now_s = iter(float(second) for second in range(10**6))
    workload = replace(SMALL, finds=4.0)
    costs = play_all(ChunkedHashTree(), reused(workload), workload, lambda: next(now_s))
    # A second passes between two looks at the clock; finds are timed in twos.
    assert costs == Costs(1e9, 0.5e9, 1e9, 1e9, finds=4.0, longest_ms=1e3)
    assert costs.per_request_us == 5e6
    assert costs.per_decision_us == 2.5e6


def test_of_repeats_each_operation_counts_at_its_least() -> None:
    assert best_of([Costs(1, 5, 3, 7, 2.0, 9), Costs(2, 4, 4, 6, 2.0, 8)]) == Costs(1, 4, 3, 6, 2.0, 8)


def test_flat_means_have_ratio_one() -> None:
    rows = [Costs(2, 6, 1, 1, 1.0).figures(), Costs(2, 3, 4, 1, 1.0).figures()]
    assert largest_to_smallest(rows) == {
        "insert_ns": 1.0, "find_ns": 2.0, "add_ns": 4.0, "finish_ns": 1.0, "per_request_us": 1.0
    }  # fmt: skip


def test_computed_hashes_are_counted_as_memory_of_the_tree() -> None:
    of_computed, of_reused = (bytes_per_waiting_request(each, SMALL) for each in (computed, reused))
    # Ten 64-bit numbers more, of up to 36 bytes.
    assert of_reused + 10 * 30 < of_computed < of_reused + 10 * 60


# The command.


def test_json_has_the_operations_at_its_top_and_what_they_are_compared_with(capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, replace(HUNDRED, groups=4, finds=2.0))
    columns = [*(f"{name}_ns" for name in OPERATIONS), "per_request_us"]
    for figures in (found, found["reused"], found["published"], *found["by_waiting"]):
        assert all(figures[name] > 0 for name in columns)
        whole = figures["insert_ns"] + 2 * figures["find_ns"] + figures["add_ns"] + figures["finish_ns"]
        assert figures["per_request_us"] == pytest.approx(whole / 1e3, abs=0.1)
    for figures in (found, found["reused"]):
        assert len(figures["per_request_us_by_repeat"]) == 2
        assert figures["per_request_us"] <= min(figures["per_request_us_by_repeat"])
        assert figures["per_request_us_with_gc"] > 0
        assert figures["bytes_per_waiting_request"] > 100
    assert found["paper"]["insert_ns"] == 153_714
    assert found["published"]["requests"] == 100
    assert [row["waiting"] for row in found["by_waiting"]] == [20, 40]
    assert list(found["largest_to_smallest"]) == columns
    assert min(found["largest_to_smallest"].values()) >= 1
    assert all(row["longest_ms"] > 0 for row in found["by_waiting"])
    assert found["orders"]["waiting"] == 100
    for name in ("longest_prefix_match", "depth_first_by_weight"):
        assert all(found["orders"][name][over]["decision_us"] > 0 for over in ("tokens", "chunks"))
    assert found["workload"]["groups"] == 4
    assert isinstance(found["aims"]["met"], bool)
    assert gc.isenabled()


def test_the_papers_request_is_239_us_with_its_finds(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys)["paper"]["per_request_us"] == pytest.approx(239, abs=0.1)


def test_sizes_that_do_not_fit_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    few = replace(QUICK, most_hashes=10 * 30, most_published_hashes=10 * 50, most_ordered_tokens=640 * 25)
    found = printed(capsys, sizes=few)
    assert [row["waiting"] for row in found["by_waiting"]] == [20]
    assert found["waiting_left_out"] == [40]
    assert found["published"]["requests"] == 50
    assert found["orders"]["waiting"] == 25


def test_people_get_tables_of_eighty_columns(capsys: pytest.CaptureFixture[str]) -> None:
    cht_run.bench_cht(HUNDRED, None, as_json=False, sizes=QUICK)
    lines = capsys.readouterr().out.splitlines()
    assert all(len(each) <= 80 for each in lines), max(lines, key=len)
    for name in (*OPERATIONS, "largest / smallest", "longest prefix match"):
        assert any(each.startswith(name) for each in lines)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tokens", 63], "--tokens: must be at least one chunk, 64 in whole blocks of 32, got 63"),
        (["--tokens", 63, "--chunk-tokens", 50], "--tokens: must be at least one chunk, 64 in whole blocks of 32"),
        (["--tokens", 20, "--chunk-tokens", 1], "--tokens: must be at least one chunk, 32 in whole blocks"),
        (["--requests", 4, "--groups", 5], "--groups: must be at most --requests, 4, got 5"),
        (["--groups", 200, "--tokens", 1_000_000], "--groups: must be at most 100 of so many tokens, got 200"),
        (["--tokens", 1_000_000, "--chunk-tokens", 1], "--chunk-tokens: must be at least 50 for so many tokens"),
        (["--requests", 1_000_000], "--requests: must be at most 256410 of 78 chunks"),
        (["--plot", "costs.txt"], "--plot: must end with one of .png"),
        (["--plot", "/nowhere/costs.png"], "--plot: there is no folder /nowhere"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, arguments: list[object], said: str
) -> None:
    measured = handed_over(monkeypatch, cht_run, "measure")
    refused = bench(*arguments).exception
    assert isinstance(refused, ConfigError)
    assert said in str(refused) and not measured


def test_options_say_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = handed_over(monkeypatch, cht_run, "bench_cht")
    assert bench("--requests", 100, "--tokens", 640, "--groups", 4, "--finds", 2, "--seed", 7, "--json").exit_code == 0
    assert bench("--chunk-tokens", 128, "--plot", "costs.png").exit_code == 0
    assert measured == [
        (replace(HUNDRED, groups=4, finds=2.0, seed=7), None, {"as_json": True}),
        (ChtWorkload(chunk_tokens=128), Path("costs.png"), {"as_json": False}),
    ]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--requests", "0"), ("--requests", "-5"), ("--tokens", "-1"), ("--groups", "0"), ("--chunk-tokens", "0"),
        ("--finds", "0.5"), ("--finds", "inf"), ("--finds", "nan"), ("--seed", "-1"), ("--requests", "many"),
    ],
)  # fmt: skip
def test_numbers_out_of_range_are_refused(option: str, value: str) -> None:
    result = bench(option, value)
    assert result.exit_code == 2
    assert option in result.output
