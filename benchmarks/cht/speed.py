"""What the operations of the chunked hash tree cost: the measurement behind `rachis bench cht`.

Of several repeats each operation's least mean counts, since other processes can only add to it. Python's collector of
cyclic garbage rests meanwhile; figures with it are given apart. By waiting: so many wait all the time while one arrives
for each that joins, for longer than it takes to replace all of them, so that the cleaning of heaps, which comes once in
so many operations, is in the mean, and is the longest operation. Orders are measured in CPU time.
"""

import gc
import tracemalloc
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

from benchmarks.cht.play import BATCH_REQUESTS, OPERATIONS, Costs, HashTree, Play, best_of, play_all
from benchmarks.cht.prefix_orders import PrefixTree, Prompt, depth_first_by_weight, longest_prefix_match
from benchmarks.cht.published_hash_tree import PublishedHashTree
from benchmarks.cht.workload import Arrivals, ChtWorkload, computed, reused, token_lists
from benchmarks.measuring_process import Reports, foreign_cpu_s
from cluster_core.clock import cpu_s, monotonic_s
from decode_worker.chunked_hash_tree import ChunkedHashTree

# FEATHER Table 5.1, in C++ on the authors' machine: 239 us for a request with 5.3 finds.
_PAPER_NS = {"insert_ns": 153_714, "find_ns": 6_641, "add_ns": 11_143, "finish_ns": 38_952}
AIM_COMPUTED_US, AIM_REUSED_US = 120, 30
ORDER_REPEATS = 3
_MOST_ORDERED = 5_000
_MOST_TRACED = 1_000


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a measurement goes through."""

    waiting: tuple[int, ...] = (1_000, 5_000, 20_000, 50_000)
    repeats: int = 5
    waiting_repeats: int = 3
    # At so many waiting requests, where few wait.
    least_turns: int = 2_000
    # In a tree at once: 36 to 73 bytes each.
    most_hashes: int = 20_000_000
    # The published tree takes its time.
    most_published_hashes: int = 500_000
    most_ordered_tokens: int = 50_000_000


SIZES = Sizes()
MOST_CHUNKS = SIZES.most_hashes // SIZES.waiting[0]


def measure(workload: ChtWorkload, reports: Reports, sizes: Sizes = SIZES) -> dict[str, Any]:
    """All figures, for JSON."""
    began_s, foreign_s = monotonic_s(), foreign_cpu_s()
    chunks = workload.tokens // workload.reused_chunk_tokens
    fitting = [each for each in sizes.waiting if each * chunks <= sizes.most_hashes]
    published_requests = max(1, min(workload.requests, sizes.most_published_hashes // workload.chunks))
    reports.total(2 * (sizes.repeats + 1) + 1 + len(fitting) + 4)
    reports.phase("hashes computed")
    by_computed, computed_figures = _figures(computed, workload, sizes.repeats, reports)
    reports.phase("hashes reused")
    by_reused, reused_figures = _figures(reused, workload, sizes.repeats, reports)
    reports.phase("published tree")
    published = _timed(PublishedHashTree(), computed, replace(workload, requests=published_requests))
    reports.done()
    rows = by_waiting(workload, replace(sizes, waiting=tuple(fitting)), reports)
    ordered = min(workload.requests, _MOST_ORDERED, sizes.most_ordered_tokens // workload.tokens)
    orders = measure_orders(workload, ordered, reports)
    took_s = monotonic_s() - began_s
    return {
        **computed_figures,
        "reused": {**reused_figures, "chunk_tokens": workload.reused_chunk_tokens},
        "published": {**published.figures(), "requests": published_requests},
        "paper": {
            **Costs(**_PAPER_NS, finds=workload.finds).figures(),
            "requests": 5000,
            "tokens": 5000,
            "machine": "C++ on the authors' machine",
        },
        "aims": {
            "per_request_us": AIM_COMPUTED_US,
            "reused_per_request_us": AIM_REUSED_US,
            "met": by_computed.per_request_us <= AIM_COMPUTED_US and by_reused.per_request_us <= AIM_REUSED_US,
        },
        "by_waiting": rows,
        "waiting_left_out": [each for each in sizes.waiting if each not in fitting],
        "largest_to_smallest": largest_to_smallest(rows),
        "decision_us": round(by_reused.per_decision_us, 2),
        "orders": orders,
        "workload": {**asdict(workload), "own_tokens": workload.own_tokens, "batch_requests": BATCH_REQUESTS},
        "repeats": sizes.repeats,
        "foreign_cores": round((foreign_cpu_s() - foreign_s) / took_s, 2),
        "took_s": round(took_s, 1),
    }


def by_waiting(workload: ChtWorkload, sizes: Sizes, reports: Reports) -> list[dict[str, Any]]:
    """For ascending numbers of waiting requests, in one tree that grows; with hashes reused."""
    play = Play(ChunkedHashTree(), reused(workload), workload)
    for _ in range(BATCH_REQUESTS):
        play.insert()
        play.admit()
    rows, waiting = [], 0
    for size in sizes.waiting:
        reports.phase(f"{size} waiting")
        for _ in range(size - waiting):
            play.insert()
        waiting = size
        tries = []
        for _ in range(sizes.waiting_repeats):
            with _collector_off():
                play.forget_times()
                for _ in range(max(5 * size // 4, sizes.least_turns)):
                    play.insert()
                    play.admit()
                tries.append(play.costs())
        best = best_of(tries)
        rows.append({"waiting": size, **best.figures(), "longest_ms": round(best.longest_ms, 4)})
        reports.done()
    return rows


def largest_to_smallest(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each mean, over the numbers of waiting requests: 1 is flat."""
    return {
        name: round(max(row[name] for row in rows) / min(row[name] for row in rows), 2)
        for name in (*(f"{each}_ns" for each in OPERATIONS), "per_request_us")
    }


def measure_orders(workload: ChtWorkload, waiting: int, reports: Reports) -> dict[str, Any]:
    """By order and by what the radix tree is over. A decision is one order of all who wait: the next needs another,
    since the batch has changed by then.

    Cached are the prompts of a batch and nothing of the past, which is the best case for both.
    """
    arrived = [array("I", tokens) for tokens in islice(token_lists(workload), BATCH_REQUESTS + waiting)]
    _, hashes_of = computed(workload)
    prompts: dict[str, list[Prompt]] = {"tokens": list(arrived), "chunks": [hashes_of(each) for each in arrived]}
    orders: dict[str, dict[str, Any]] = {"longest_prefix_match": {}, "depth_first_by_weight": {}}
    for over, each in prompts.items():
        reports.phase(f"orders over {over}")
        for name, measure_order in (("longest_prefix_match", _lpm_s), ("depth_first_by_weight", _dfs_s)):
            insert_s, order_s = measure_order(each[:BATCH_REQUESTS], each[BATCH_REQUESTS:])
            orders[name][over] = {"insert_ns": round(1e9 * insert_s), "decision_us": round(1e6 * order_s, 1)}
            reports.done()
    return {"waiting": waiting, **orders}


def _lpm_s(batch: Sequence[Prompt], waiting: Sequence[Prompt]) -> tuple[float, float]:
    """CPU seconds to insert a prompt, and to order."""
    tree = PrefixTree()
    insert_s = _cpu_s(lambda: [tree.insert(prompt) for prompt in batch]) / len(batch)
    return insert_s, min(_cpu_s(lambda: longest_prefix_match(tree, waiting)) for _ in range(ORDER_REPEATS))


def _dfs_s(batch: Sequence[Prompt], waiting: Sequence[Prompt]) -> tuple[float, float]:
    tree = PrefixTree()
    insert_s = _cpu_s(lambda: [tree.insert(prompt) for prompt in (*batch, *waiting)]) / (len(batch) + len(waiting))
    nodes = [tree.insert(prompt) for prompt in waiting]
    return insert_s, min(_cpu_s(lambda: depth_first_by_weight(tree, nodes)) for _ in range(ORDER_REPEATS))


def bytes_per_waiting_request(arrivals: Callable[[ChtWorkload], Arrivals], workload: ChtWorkload) -> int:
    """Its chunk hashes, where they are computed, and its place in the tree; not the prompt."""
    prompts, hashes_of = arrivals(workload)
    arrived = list(islice(prompts, min(workload.requests, _MOST_TRACED)))
    tree = ChunkedHashTree()
    # Garbage of others, and what collecting it gives back, would count.
    gc.collect()
    tracemalloc.start()
    try:
        for index, each in enumerate(arrived):
            tree.insert(f"r{index}", hashes_of(each))
        gc.collect()
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return held_bytes // len(arrived)


def _figures(
    arrivals: Callable[[ChtWorkload], Arrivals], workload: ChtWorkload, times: int, reports: Reports
) -> tuple[Costs, dict[str, Any]]:
    repeats = []
    for _ in range(times):
        repeats.append(_timed(ChunkedHashTree(), arrivals, workload))
        reports.done()
    with_gc = play_all(ChunkedHashTree(), arrivals(workload), workload)
    reports.done()
    best = best_of(repeats)
    return best, {
        **best.figures(),
        "per_request_us_by_repeat": [round(each.per_request_us, 2) for each in repeats],
        "per_request_us_with_gc": round(with_gc.per_request_us, 2),
        "bytes_per_waiting_request": bytes_per_waiting_request(arrivals, workload),
    }


def _timed(tree: HashTree, arrivals: Callable[[ChtWorkload], Arrivals], workload: ChtWorkload) -> Costs:
    with _collector_off():
        return play_all(tree, arrivals(workload), workload)


@contextmanager
def _collector_off() -> Iterator[None]:
    """Python's collector of cyclic garbage, which runs when it likes."""
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _cpu_s(what: Callable[[], object]) -> float:
    with _collector_off():
        began_s = cpu_s()
        what()
        return cpu_s() - began_s
