"""What a decode step costs by what its batch shares: shapes, made-up measurements, the fit and the verdict."""

import itertools
import json
import math
import random
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.decode_locality.batches import QUICK, BatchShape, Grid, KvReads, Order, longest_paths, pool_blocks
from benchmarks.decode_locality.fit import Measured, fit_cache, fit_linear, non_negative_least_squares
from benchmarks.decode_locality.measure import measure, result, visit_in_rounds
from benchmarks.decode_locality.plot import table_of
from cluster_configs.loading import load
from cluster_configs.schema import RachisConfig
from cluster_core.errors import ConfigError, InvalidInputError
from command_line.bench.decode_locality_run import Options, checked

BLOCK_TOKENS = 16
GRID = Grid((1, 4, 16), (1, 2), (256, 1024), (32,))
OPTIONS = Options(Path("figures.json"), None, True, None, None, None, None, 1, 60.0, 0)
ORDERS: tuple[Order, ...] = ("interleaved", "grouped")
levels = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 70)), min_size=1, max_size=3).map(tuple)


@st.composite
def shapes(draw: st.DrawFn) -> BatchShape:
    batch = draw(st.integers(1, 7))
    divergent = draw(st.integers(0, batch))
    strangers = draw(st.integers(0, batch - divergent))
    order = draw(st.sampled_from(ORDERS))
    return BatchShape(batch, draw(levels), draw(st.integers(1, 40)), order, divergent, strangers)


def replayed(shape: BatchShape) -> KvReads:
    """The slow model of `BatchShape.reads`: every block of every request, one after the other."""
    tables = shape.block_tables(BLOCK_TOKENS, itertools.count())
    last_read: dict[int, int] = {}
    by_reuse: dict[int, int] = {}
    now = distinct = 0
    for table, length in zip(tables, shape.lengths(), strict=True):
        for index, block in enumerate(table):
            tokens = min(BLOCK_TOKENS, length - index * BLOCK_TOKENS)
            if block in last_read:
                distance = now - last_read[block]
                by_reuse[distance] = by_reuse.get(distance, 0) + tokens
            else:
                distinct += tokens
            last_read[block] = now
            now += tokens
    return KvReads(now, distinct, by_reuse)


@given(shapes())
def test_reads_are_those_of_a_replay_block_by_block(shape: BatchShape) -> None:
    assert shape.reads(BLOCK_TOKENS) == replayed(shape)


@given(shapes(), st.integers(0, 500))
def test_missed_tokens_lie_between_none_and_all_that_are_read_again(shape: BatchShape, capacity: int) -> None:
    reads = shape.reads(BLOCK_TOKENS)
    assert reads.missed(math.inf) == 0 <= reads.missed(capacity) <= reads.missed(0)
    assert reads.missed(0) + reads.distinct_tokens == reads.total_tokens


def test_requests_of_one_group_share_all_but_the_partial_block() -> None:
    reads = BatchShape(4, ((1, 100),), 32).reads(BLOCK_TOKENS)
    assert (reads.total_tokens, reads.distinct_tokens) == (4 * 132, 132 + 3 * (32 + 100 % BLOCK_TOKENS))
    assert reads.by_reuse == {132: 3 * 96}


def test_grouped_order_reads_a_prefix_again_right_away() -> None:
    interleaved, grouped = (BatchShape(4, ((2, 64),), 16, order) for order in ORDERS)
    assert interleaved.reads(BLOCK_TOKENS).by_reuse == {160: 128}
    assert grouped.reads(BLOCK_TOKENS).by_reuse == {80: 128}
    assert interleaved.groups == grouped.groups == 2


def test_a_tree_shares_its_root_among_all_and_its_leaves_among_few() -> None:
    reads = BatchShape(4, ((1, 64), (2, 32)), 16).reads(BLOCK_TOKENS)
    assert reads.distinct_tokens == 64 + 2 * 32 + 4 * 16


def test_divergent_requests_bring_a_prefix_each_and_strangers_bring_none() -> None:
    alike = BatchShape(4, ((1, 64),), 16)
    divergent, stranger = replace(alike, divergent=2), replace(alike, strangers=1)
    assert divergent.reads(BLOCK_TOKENS).distinct_tokens - alike.reads(BLOCK_TOKENS).distinct_tokens == 2 * 64
    assert stranger.reads(BLOCK_TOKENS).distinct_tokens == alike.reads(BLOCK_TOKENS).distinct_tokens
    assert (divergent.groups, stranger.groups) == (3, 2)
    assert stranger.lengths() == [80, 80, 80, 16]


def test_grid_has_every_shape_once_and_batches_that_share_nothing() -> None:
    for grid in (Grid(), QUICK, GRID):
        every = grid.shapes()
        assert len(every) == len(set(every))
        assert all({batch, 1} <= {shape.groups for shape in every if shape.batch == batch} for batch in grid.batches)
        assert {shape.groups for shape in every if shape.batch == 1} == {1}


def test_series_goes_from_none_to_all_divergent() -> None:
    assert [shape.divergent for shape in Grid().divergence(512)] == [0, 1, 2, 3, 4, 8, 15]
    assert [shape.divergent for shape in QUICK.divergence(512)] == [0, 1, 2, 3, 4, 7]
    assert Grid((1,)).divergence(512) == [BatchShape(1, ((1, 512),), 32)]


def test_pool_holds_all_prefixes_at_once() -> None:
    every = GRID.shapes()
    counter = itertools.count()
    tables: dict[tuple[int, ...], int] = {}
    for path in longest_paths(every):
        for depth in range(1, len(path) + 1):
            name = tuple(index for index, _ in path[:depth])
            tables[name] = max(tables.get(name, 0), path[depth - 1][1])
    blocks = sum(-(-tokens // BLOCK_TOKENS) for tokens in tables.values())
    largest = max(len({*itertools.chain(*shape.block_tables(BLOCK_TOKENS, counter))}) for shape in every)
    assert pool_blocks(every, BLOCK_TOKENS) >= max(blocks, largest)


@given(st.lists(st.lists(st.integers(-9, 9), min_size=3, max_size=3), min_size=4, max_size=8))
def test_least_squares_are_never_negative_and_no_step_makes_them_less(rows: list[list[int]]) -> None:
    matrix, target = np.array(rows, dtype=float)[:, :2], np.array(rows, dtype=float)[:, 2]
    factors = non_negative_least_squares(matrix, target)
    gradient = matrix.T @ (matrix @ factors - target)
    assert (factors >= 0).all()
    # The conditions of an optimum: no way down from a factor of 0, and none at all from a positive one.
    assert (gradient >= -1e-6).all()
    assert abs(gradient * factors).max() < 1e-6


StepMs = Callable[[BatchShape], float]


def by_locality(shape: BatchShape) -> float:
    reads = shape.reads(BLOCK_TOKENS)
    return 1.0 + 0.05 * shape.batch + 1e-4 * reads.total_tokens + 5e-4 * reads.distinct_tokens


def by_capacity(shape: BatchShape) -> float:
    return by_locality(shape) + 3e-4 * shape.reads(BLOCK_TOKENS).missed(1100)


def all_or_nothing(shape: BatchShape) -> float:
    """Reads a prefix once while all share it, and else everything for every request."""
    reads = shape.reads(BLOCK_TOKENS)
    homogeneous = shape.groups == 1
    return 1.0 + 0.05 * shape.batch + 5e-4 * (reads.distinct_tokens if homogeneous else reads.total_tokens)


def test_linear_model_is_found_again() -> None:
    fit = fit_linear([(shape.batch, shape.reads(BLOCK_TOKENS), by_locality(shape)) for shape in GRID.shapes()])
    found = (fit.base_ms, fit.per_request_ms, fit.per_total_token_ms, fit.per_distinct_token_ms)
    assert found == pytest.approx((1.0, 0.05, 1e-4, 5e-4))
    assert fit.max_error_pct < 1e-6


def test_capacity_of_a_cache_is_found_again() -> None:
    samples = [(shape.batch, shape.reads(BLOCK_TOKENS), by_capacity(shape)) for shape in GRID.shapes()]
    fit = fit_cache(samples)
    assert fit.capacity_tokens is not None
    # The longest request of one group fits, two of them do not.
    assert 1056 <= fit.capacity_tokens < 2 * 1056
    assert fit.per_missed_token_ms == pytest.approx(3e-4)
    assert fit.max_error_pct < 1e-6 < fit_linear(samples).max_error_pct


def test_batches_that_share_nothing_have_no_capacity_to_find() -> None:
    fit = fit_cache([(batch, KvReads(100 * batch, 100 * batch), 1.0 + batch) for batch in (1, 2, 4)])
    assert fit.capacity_tokens is None
    assert "per_missed_token_ms" not in fit.figures()


def test_where_missing_costs_nothing_the_cache_model_is_the_linear_one() -> None:
    samples = [(1, KvReads(1000, 1000), 2.0), (1, KvReads(1000, 1000, {100: 500}), 1.0)]
    assert fit_cache(samples) == fit_linear(samples)


def reckoned(step_ms: StepMs, spread: float = 0.0) -> dict[str, Any]:
    return result(GRID, {shape: Measured(step_ms(shape), 16, spread) for shape in GRID.shapes()}, BLOCK_TOKENS)


def test_locality_explains_the_jump_of_the_first_divergent_request() -> None:
    verdict = reckoned(by_locality)["verdict"]
    assert not verdict["all_or_nothing"]
    assert verdict["jump_ms"] == pytest.approx(5e-4 * 1024)
    assert verdict["ratio"] == {
        "linear": pytest.approx(1),
        "cache": pytest.approx(1),
        "later_divergent": pytest.approx(1),
    }
    assert verdict["stranger_ms"] < 0
    assert (verdict["batch"], verdict["shared_tokens"]) == (16, 1024)
    assert [case["shared_tokens"] for case in verdict["cases"]] == [256, 1024]


def test_path_that_needs_the_whole_batch_to_share_is_seen() -> None:
    verdict = reckoned(all_or_nothing)["verdict"]
    assert verdict["all_or_nothing"]
    assert verdict["stranger_ms"] > 5e-4 * 1024 * 13
    assert min(verdict["ratio"][name] for name in ("linear", "cache")) > 2


def test_stranger_within_the_noise_proves_nothing() -> None:
    assert not reckoned(all_or_nothing, spread=10.0)["verdict"]["all_or_nothing"]


def test_cliff_of_a_cache_that_is_too_small_is_no_all_or_nothing_path() -> None:
    def cliff(shape: BatchShape) -> float:
        return by_locality(shape) + (5.0 if shape.reads(BLOCK_TOKENS).distinct_tokens > 2000 else 0.0)

    verdict = reckoned(cliff)["verdict"]
    assert verdict["ratio"]["later_divergent"] > 5
    assert not verdict["all_or_nothing"]


def test_without_a_batch_of_three_there_is_no_verdict() -> None:
    grid = Grid((1, 2), (1,), (64,), (32,))
    measured = {shape: Measured(by_locality(shape), 16, 0.0) for shape in grid.shapes()}
    assert result(grid, measured, BLOCK_TOKENS)["verdict"] == {"all_or_nothing": None, "cases": []}


def test_best_visit_counts_and_spread_tells_how_far_the_others_are() -> None:
    measured = Measured.of_visits([[9.0, 2.0, 2.0], [3.0, 3.0, 3.0], [4.0, 4.0, 1.0]])
    assert (measured.step_ms, measured.samples, measured.spread) == (2.0, 9, 0.5)
    assert measured.noise_ms == 1.0


def timer(step_s: float, limit_s: float) -> tuple[Callable[[BatchShape], list[float]], Callable[[], float]]:
    """Visits that take so long each, and what they leave of the limit."""
    taken = itertools.count()
    visited = [next(taken)]

    def visit(shape: BatchShape) -> list[float]:
        visited.append(next(taken))
        return [float(shape.batch)]

    return visit, lambda: limit_s - visited[-1] * step_s


def test_every_round_visits_every_shape_in_another_order() -> None:
    seen: list[BatchShape] = []
    steps: list[int] = []
    every = GRID.shapes()

    def visit(shape: BatchShape) -> list[float]:
        seen.append(shape)
        return [float(shape.batch)]

    visits = visit_in_rounds(every, 3, visit, lambda: 1e9, random.Random(0), steps.append)
    assert visits == {shape: [[float(shape.batch)]] * 3 for shape in every}
    rounds = [seen[first : first + len(every)] for first in range(0, len(seen), len(every))]
    assert all(set(each) == set(every) for each in rounds)
    assert rounds[0] != rounds[1] != rounds[2]
    assert sum(steps) == 3 * len(every)


@pytest.mark.parametrize(("limit_s", "rounds"), [(0.0, 1), (1.9, 1), (2.0, 2), (99.0, 5)])
def test_another_round_begins_only_where_it_would_end_in_time(limit_s: float, rounds: int) -> None:
    every = GRID.shapes()
    steps: list[int] = []
    visit, left_s = timer(1 / len(every), limit_s)
    visits = visit_in_rounds(every, 5, visit, left_s, random.Random(0), steps.append)
    assert {len(each) for each in visits.values()} == {rounds}
    assert sum(steps) == 5 * len(every)


def test_points_say_what_was_read_and_can_be_written() -> None:
    figures = json.loads(json.dumps(reckoned(by_capacity)))
    point = next(
        each for each in figures["points"] if (each["batch"], each["groups"], each["shared_tokens"]) == (4, 2, 256)
    )
    assert point == {
        "batch": 4, "groups": 2, "shared_tokens": 256, "suffix_tokens": 32, "order": "interleaved",
        "levels": [[2, 256]], "distinct_tokens": 2 * 256 + 4 * 32, "total_tokens": 4 * 288,
        "step_ms": pytest.approx(1.6352), "samples": 16, "spread": 0.0,
    }  # fmt: skip
    assert {(each["divergent"], each["strangers"]) for each in figures["divergence"]} >= {
        (0, 0),
        (1, 0),
        (15, 0),
        (0, 1),
    }
    assert figures["cache_fit"]["capacity_tokens"] > 1056


def test_table_shows_both_orders_where_they_differ() -> None:
    columns, rows = table_of(reckoned(by_locality))
    assert columns == ["batch", "1 group", "2 groups", "all differ"]
    assert [row[0] for row in rows] == ["1", "4", "16"]
    assert [[" / " in cell for cell in row] for row in rows] == [[False] * 4, *[[False, False, True, False]] * 2]
    assert rows[0][2] == "-"


def test_options_replace_parts_of_the_grid() -> None:
    given = replace(OPTIONS, batches="4, 1,4", shared_tokens="100")
    assert checked(given, load()) == replace(QUICK, batches=(1, 4), shared_tokens=(100,))
    assert checked(replace(OPTIONS, quick=False), load()) == Grid()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batches": "1,x"}, "--batches: must be whole numbers with commas, got '1,x'"),
        ({"batches": ""}, "--batches: must be whole numbers"),
        ({"groups": "0"}, "--groups: must be from 1 to 1024"),
        ({"suffix_tokens": "15"}, "--suffix: must be from 16"),
        ({"shared_tokens": "4090"}, "--shared: 4122 tokens with the suffix, engine.max_model_len is 4096"),
        ({"groups": ",".join(map(str, range(1, 18)))}, "--groups: must be at most 16 numbers, got 17"),
    ],
)
def test_wrong_option_is_told_before_an_engine_starts(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checked(replace(OPTIONS, **options), load())


class TooSmall:
    """A decoder that holds nothing."""

    name = "made up"
    block_size_tokens = BLOCK_TOKENS

    def __init__(self) -> None:
        self.stopped = False

    def holds(self, shape: BatchShape) -> bool:
        return False

    def stop(self) -> None:
        self.stopped = True


async def test_a_grid_of_which_nothing_fits_is_refused() -> None:
    decoder = TooSmall()
    arguments = {"config": RachisConfig().model_dump(mode="json"), "grid": asdict(GRID), "rounds": 1, "seed": 0}

    with pytest.raises(InvalidInputError, match="no batch of the grid fits"):
        await measure(arguments, cast(Any, None), lambda *_: cast(Any, decoder))

    assert decoder.stopped
