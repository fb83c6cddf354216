"""Prompts of `rachis bench tiers`, the closed loop against the fake engine, figures, and options that cannot be."""

from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import combinations, takewhile
from typing import Any

import pytest

from benchmarks.closed_loop import Answer, closed_loop
from benchmarks.tiers import COPY_EVERYTHING, RACHIS, STOCK, Run, compare, require_identical, ttft_ms
from benchmarks.tiers_workload import (
    TiersWorkload,
    default_device_blocks,
    fewest_device_blocks,
    longest_tokens,
    prompts_of,
    shared_blocks,
    wrong_tokens,
)
from cluster_core.engine_jobs import EngineJob, EngineOutput
from cluster_core.engine_reports import TierReport
from cluster_core.errors import ClientFault, UnavailableError
from cluster_sim.workloads.few_shot import SHAPES
from tests.command import rachis
from tests.fakes.engine import FakeEngine

BLOCK_TOKENS = 32
VOCABULARY = 400
shapes = pytest.mark.parametrize("shape", SHAPES)


@shapes
def test_two_prompts_share_the_tokens_of_the_blocks_that_they_share_and_no_block_more(shape: str) -> None:
    trace = TiersWorkload(shape, requests=40).trace(BLOCK_TOKENS)
    prompts = prompts_of(trace, VOCABULARY, seed=0)
    for (one, left), (other, right) in combinations(zip(prompts, trace, strict=True), 2):
        common_tokens = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))
        common_blocks = len(set(left.hashes) & set(right.hashes))
        assert common_blocks * BLOCK_TOKENS <= common_tokens < (common_blocks + 1) * BLOCK_TOKENS


@shapes
def test_prompts_are_as_long_as_the_trace_says_and_of_known_tokens(shape: str) -> None:
    trace = TiersWorkload(shape, requests=20).trace(BLOCK_TOKENS)
    prompts = prompts_of(trace, VOCABULARY, seed=0)
    assert [len(each) for each in prompts] == [request.input_tokens for request in trace]
    assert all(0 <= token < VOCABULARY for each in prompts for token in each)


def test_prompts_depend_on_the_seed_alone() -> None:
    trace = TiersWorkload("mmlu", requests=5).trace(BLOCK_TOKENS)
    assert prompts_of(trace, VOCABULARY, seed=1) == prompts_of(trace, VOCABULARY, seed=1)
    assert not set(prompts_of(trace, VOCABULARY, seed=1)) & set(prompts_of(trace, VOCABULARY, seed=2))


def test_noise_shares_nothing() -> None:
    assert shared_blocks(TiersWorkload("mmlu", requests=50, noise_share=1.0).trace(BLOCK_TOKENS)) == 0


def test_device_holds_a_part_of_what_is_shared_and_no_less_than_what_runs_together() -> None:
    many_groups, one_group = (TiersWorkload(shape).trace(BLOCK_TOKENS) for shape in ("mmlu", "hellaswag"))
    assert default_device_blocks(many_groups, 1) == round(shared_blocks(many_groups) / 2.5)
    assert default_device_blocks(one_group, 1) == fewest_device_blocks(one_group, 1) > shared_blocks(one_group)
    assert fewest_device_blocks(one_group, 3) * BLOCK_TOKENS >= 3 * longest_tokens(one_group)


@pytest.mark.parametrize("concurrency", [1, 3])
async def test_closed_loop_keeps_the_order_of_the_prompts_and_the_engine_as_busy_as_asked(concurrency: int) -> None:
    done, running = list[None](), list[int]()
    prompts = [(number,) * 5 for number in range(10)]

    class Watched(FakeEngine):
        async def generate(self, job: EngineJob) -> AsyncIterator[EngineOutput]:
            running.append(len(running) + 1 - len(done))
            async for output in super().generate(job):
                yield output

    answers = await closed_loop(Watched(), prompts, 3, concurrency, lambda: done.append(None))
    assert max(running) == concurrency
    assert len(done) == len(prompts)
    assert [each.prompt_tokens for each in answers] == [5] * 10
    alone = [await closed_loop(FakeEngine(), [each], 3, 1) for each in prompts]
    assert [each.tokens for each in answers] == [each.tokens for (each,) in alone]
    assert all(len(each.tokens) == 3 and each.ttft_ms > 0 for each in answers)


async def test_death_of_the_engine_ends_the_loop_with_one_error() -> None:
    engine = FakeEngine()
    engine.die("of the test")
    with pytest.raises(UnavailableError, match="of the test"):
        await closed_loop(engine, [(1,), (2,)], 1, 2)


def report(**numbers: Any) -> TierReport:
    zeros = TierReport(
        prompt_tokens=0, device_hit_tokens=0, host_hit_tokens=0, device_blocks=0, device_capacity_blocks=0,
        host_blocks=0, host_capacity_blocks=0, copied_out_blocks=0, copied_out_bytes=0, copy_out_s=0.0,
        copied_back_blocks=0, copied_back_async_blocks=0, copied_back_bytes=0, copy_back_s=0.0,
        failed_copy_blocks=0, refused_offers={},
        promoted_blocks=0, promoted_used_blocks=0, promoted_wasted_blocks=0, evicted_device_blocks=0,
        evicted_host_blocks=0,
        evicted_device_for_others_blocks=0,
        evicted_host_for_others_blocks=0,
    )  # fmt: skip
    return replace(zeros, **numbers)


def answers(*ttft: float, cached: int = 0) -> list[Answer]:
    return [Answer(ms, 100, cached, (1, 2)) for ms in ttft]


def test_figures_are_medians_of_times_and_sums_of_what_was_counted_since_the_warm_up() -> None:
    before = report(copied_out_blocks=5, copied_out_bytes=50, host_hit_tokens=32, refused_offers={"late": 1})
    after = report(
        copied_out_blocks=8, copied_out_bytes=80, copied_back_bytes=10, host_hit_tokens=64, refused_offers={"late": 4}
    )
    stock = [Run(answers(10, 40), 2.0, 0.0)] * 2
    copying = [Run(answers(20, 40, cached=40), took_s, 0.5, before, after) for took_s in (1.0, 3.0)]
    rachis = [Run(answers(5, ms, cached=50), 1.0, 0.1, before, before) for ms in (5, 25)]
    table = compare({STOCK: stock, COPY_EVERYTHING: copying, RACHIS: rachis})

    copied = table[COPY_EVERYTHING]
    assert copied["prompt_tokens"] == 400
    assert copied["tokens_computed"] == 240
    assert copied["hit_ratio"] == 0.4
    assert (copied["device_hit_tokens"], copied["host_hit_tokens"]) == (96, 64)
    assert (copied["copied_out_blocks"], copied["copied_bytes"]) == (6, 80)
    assert copied["refused_offers"] == {"late": 6}
    assert copied["total_s"] == 2.0
    assert copied["vs_stock"] == {
        "ttft_mean": 1.2, "ttft_p50": 1.2, "ttft_p90": pytest.approx(38 / 37, abs=1e-4),
        "ttft_p99": pytest.approx(39.8 / 39.7, abs=1e-4), "total_s": 1.0, "tokens_computed": 0.6, "copied_bytes": None,
    }  # fmt: skip
    assert table[RACHIS]["ttft_ms"]["mean"] == 10.0
    assert table[RACHIS]["vs_copy_everything"]["copied_bytes"] == 0.0
    assert table[STOCK]["host_hit_tokens"] == 0
    assert table[STOCK]["refused_offers"] == {}


def test_ttft_of_a_request_is_the_median_of_its_rounds() -> None:
    assert ttft_ms([Run(answers(*each), 1.0, 0.0) for each in [(1, 9), (2, 8), (6, 1)]]) == [2.0, 8.0]


@pytest.mark.parametrize(
    ("given", "wrong"), [([(1, 2), (3, 4)], 0), ([(1, 2), (3, 5)], 1), ([(1,), (4, 3)], 3), ([(1, 2, 3), (3, 4)], 1)]
)
def test_every_place_in_which_an_answer_differs_is_a_wrong_token(given: list[tuple[int, ...]], wrong: int) -> None:
    assert wrong_tokens([(1, 2), (3, 4)], given) == wrong


def test_wrong_token_ends_the_benchmark() -> None:
    stock = Run(answers(1, 1), 1.0, 0.0)
    require_identical(RACHIS, stock, stock)
    other = replace(stock, answers=[stock.answers[0], replace(stock.answers[1], tokens=(1, 3))])
    with pytest.raises(UnavailableError, match="wrong tokens: 1 of 4 in rachis, against stock"):
        require_identical(RACHIS, other, stock)


LONGEST = longest_tokens(TiersWorkload("mmlu").trace(BLOCK_TOKENS))
FEWEST = -(-LONGEST // BLOCK_TOKENS)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--shape", "gsm8k"], "--shape: must be of mmlu, hellaswag, bbh, ceval, got gsm8k"),
        (["--shape", "bbh", "--requests", "9000"], "--requests: bbh has 6511 queries, got 9000"),
        (
            ["--device-blocks", str(FEWEST - 1)],
            f"--device-blocks: must be at least {FEWEST}, for 1 of the longest prompts at once, got {FEWEST - 1}",
        ),
        (
            ["--concurrency", "2", "--device-blocks", str(FEWEST)],
            f"--device-blocks: must be at least {2 * FEWEST}, for 2 of the longest prompts at once, got {FEWEST}",
        ),
        (
            ["--set", "engine.max_model_len=512"],
            f"engine.max_model_len: must be at least {LONGEST} for mmlu, got 512",
        ),
        (["--plot", "ttft.txt"], "--plot: must end with one of .png, .svg, .pdf, got ttft.txt"),
        (["--plot", "nowhere/ttft.png"], "--plot: there is no folder"),
        (["--set", "tiers.eviction=best"], "tiers.eviction"),
    ],
)
def test_what_cannot_be_is_refused_by_name_before_anything_starts(arguments: list[str], told: str) -> None:
    refused = rachis("bench", "tiers", *arguments).exception
    assert isinstance(refused, ClientFault), refused
    assert told in str(refused)


@pytest.mark.parametrize(
    ("arguments", "limit"),
    [
        (["--requests", "1"], "2"),
        (["--requests", "10001"], "10000"),
        (["--noise-share", "1.5"], "1"),
        (["--noise-share", "nan"], "1"),
        (["--concurrency", "0"], "1"),
        (["--concurrency", "65"], "64"),
        (["--rounds", "0"], "1"),
        (["--device-blocks", "7"], "8"),
        (["--device-blocks", "16385"], "16384"),
        (["--host-gib", "-1"], "0"),
        (["--host-gib", "65"], "64"),
        (["--host-gib", "nan"], "64"),
        (["--host-ratio", "65"], "64"),
        (["--seed", "-1"], "0"),
    ],
)
def test_option_out_of_range_is_told_with_its_limit(arguments: list[str], limit: str) -> None:
    refused = rachis("bench", "tiers", *arguments)
    assert refused.exit_code == 2
    # Out of its frame, which breaks lines.
    told = " ".join(refused.stderr.replace("│", " ").split())
    assert f"Invalid value for '{arguments[0]}'" in told
    assert f"equal to {limit} " in told
