"""Prompt tokens of a step beside decodes: bounded by their objective, and when that yields."""

from collections.abc import Sequence
from functools import partial
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster_core.engine_reports import EngineCosts
from decode_worker.step_bound import ALPHA, Chunk, Limit, PromptWork, StepRoom, bounded_chunk, spare_s, step_s

# A step takes 10 ms for decodes, 2 ms for having a prompt, and 0.1 ms for each token of it.
COSTS = EngineCosts(decode_step_s=0.010, prefill_s=0.002, prefill_s_per_token=0.0001)
TPOT_S = 0.050
# 0.95 x 50 ms leave 35.5 ms for tokens.
BOUNDED = 355
ROOM = StepRoom(most_tokens=2048, block_tokens=32)
LONG = PromptWork(0, 4000)


def chunk_of(
    prompts: Sequence[PromptWork], costs: EngineCosts, tpot_s: float, room: StepRoom, spare: float = inf
) -> Chunk:
    return bounded_chunk(prompts, partial(step_s, costs, prompts), ALPHA * tpot_s, room, spare)


def test_a_chunk_ends_where_the_step_would_pass_its_share_of_the_objective() -> None:
    assert chunk_of([LONG], COSTS, TPOT_S, ROOM) == Chunk(BOUNDED, Limit.TPOT)
    assert step_s(COSTS, [LONG], BOUNDED) <= ALPHA * TPOT_S < step_s(COSTS, [LONG], BOUNDED + 1)


def test_several_prompts_share_one_chunk() -> None:
    assert chunk_of([PromptWork(0, 100)] * 9, COSTS, TPOT_S, ROOM) == Chunk(BOUNDED, Limit.TPOT)


def test_a_prompt_far_into_its_context_gets_a_smaller_chunk() -> None:
    costs = EngineCosts(decode_step_s=0.010, prefill_s_per_token=0.0001, prefill_s_per_pair=1e-8)

    early, late = (chunk_of([PromptWork(done, 4000)], costs, TPOT_S, ROOM).tokens for done in (0, 30_000))

    assert 0 < late < early


@pytest.mark.parametrize(
    ("prompts", "costs", "tokens"),
    [
        ([PromptWork(0, 200)], COSTS, 200),
        ([PromptWork(0, 100), PromptWork(50, 200)], COSTS, 300),
        ([], COSTS, 0),
        # Before anything was measured.
        ([LONG], EngineCosts(), 2048),
    ],
)
def test_what_fits_is_not_bounded(prompts: list[PromptWork], costs: EngineCosts, tokens: int) -> None:
    assert chunk_of(prompts, costs, TPOT_S, ROOM) == Chunk(tokens, Limit.WORK)


def test_where_decodes_alone_take_as_long_as_they_may_a_block_of_tokens_is_computed_all_the_same() -> None:
    costs = EngineCosts(decode_step_s=0.060, prefill_s_per_token=0.0001)

    assert chunk_of([LONG], costs, TPOT_S, ROOM) == Chunk(32, Limit.PROGRESS)
    assert chunk_of([PromptWork(0, 7)], costs, TPOT_S, ROOM) == Chunk(7, Limit.PROGRESS)


def test_the_bound_yields_as_far_as_a_first_token_needs_to_be_in_time() -> None:
    # In chunks of 355 the 4,000 tokens take 0.535 s, in larger ones less.
    assert chunk_of([PromptWork(0, 4000, due_s=0.54)], COSTS, TPOT_S, ROOM) == Chunk(BOUNDED, Limit.TPOT)

    tight = chunk_of([PromptWork(0, 4000, due_s=0.50)], COSTS, TPOT_S, ROOM)

    assert tight.limit is Limit.TTFT
    # 0.4 s for the tokens, and 12 ms for each of 8.3 steps.
    assert tight.tokens == 480


def test_what_lies_ahead_of_a_prompt_counts_towards_its_first_token() -> None:
    ahead, behind = PromptWork(0, 4000), PromptWork(0, 100, due_s=0.5)

    assert chunk_of([behind, ahead], COSTS, TPOT_S, ROOM).limit is Limit.TPOT
    assert chunk_of([ahead, behind], COSTS, TPOT_S, ROOM).limit is Limit.TTFT


def test_for_a_first_token_that_is_late_already_a_step_takes_all_it_can() -> None:
    assert chunk_of([PromptWork(0, 4000, due_s=-1.0)], COSTS, TPOT_S, ROOM) == Chunk(2048, Limit.TTFT)


def test_for_a_late_first_token_a_step_takes_no_longer_than_decodes_can_spare() -> None:
    late = [PromptWork(0, 4000, due_s=-1.0)]

    # 0.1 s more are 1,000 tokens more.
    assert chunk_of(late, COSTS, TPOT_S, ROOM, spare=0.1) == Chunk(BOUNDED + 1000, Limit.TTFT)
    assert chunk_of(late, COSTS, TPOT_S, ROOM, spare=0.0) == Chunk(BOUNDED, Limit.TPOT)
    # What needs less than that gets what it needs.
    assert chunk_of([PromptWork(0, 4000, due_s=0.50)], COSTS, TPOT_S, ROOM, spare=0.1).tokens == 480


def test_decodes_can_spare_what_their_tokens_took_less_than_they_may() -> None:
    assert spare_s([0.2]) == 0.2
    assert spare_s([0.2, 0.02]) == 0.02
    assert spare_s([-0.4, 0.2]) == 0.0
    assert spare_s([]) == inf


def test_one_of_ten_that_has_lost_its_objective_holds_back_nobody() -> None:
    behind, ahead = -8.0, 0.8

    assert spare_s([behind] + 8 * [ahead]) == 0.0
    assert spare_s([behind] + 9 * [ahead]) == ahead
    assert spare_s(2 * [behind] + 17 * [ahead]) == 0.0
    assert spare_s(2 * [behind] + 18 * [ahead]) == ahead


@given(st.lists(st.tuples(st.integers(0, 500), st.floats(0, 30), st.floats(0.005, 0.1)), min_size=1, max_size=40))
def test_after_a_step_that_takes_all_that_can_be_spared_nine_of_ten_keep_their_objective_so_far(
    decodes: list[tuple[int, float, float]],
) -> None:
    """Whatever each one's own is."""
    spare = spare_s(tokens * tpot_s - seconds for tokens, seconds, tpot_s in decodes)
    if spare:
        kept = sum(seconds + tpot_s + spare <= (tokens + 1) * tpot_s + 1e-9 for tokens, seconds, tpot_s in decodes)
        assert kept >= 0.9 * len(decodes)


def test_a_prompt_that_has_begun_is_finished_at_once_where_blocks_are_short() -> None:
    short = StepRoom(most_tokens=2048, block_tokens=32, begun_tokens=900, is_short=True)

    assert chunk_of([PromptWork(100, 900), LONG], COSTS, TPOT_S, short) == Chunk(900, Limit.MEMORY)


def test_short_blocks_do_not_matter_to_prompts_that_have_not_begun() -> None:
    short = StepRoom(most_tokens=2048, block_tokens=32, begun_tokens=0, is_short=True)

    assert chunk_of([LONG], COSTS, TPOT_S, short) == Chunk(BOUNDED, Limit.TPOT)


works = st.builds(PromptWork, st.integers(0, 5000), st.integers(1, 3000), st.sampled_from([inf, -1.0, 0.2, 1.0, 5.0]))
rooms = st.builds(StepRoom, st.integers(0, 4096), st.sampled_from([16, 32]), st.integers(0, 3000), st.booleans())


@given(st.lists(works, max_size=8), rooms, st.sampled_from([0.011, 0.02, 0.05, 0.5]), st.sampled_from([0.0, 0.05, inf]))
def test_every_chunk_is_within_the_step_computes_something_and_passes_the_bound_for_a_reason_only(
    prompts: list[PromptWork], room: StepRoom, tpot_s: float, spare: float
) -> None:
    chunk = chunk_of(prompts, COSTS, tpot_s, room, spare)

    most = min(room.most_tokens, sum(each.left_tokens for each in prompts))
    assert min(1, most) <= chunk.tokens <= most
    if chunk.limit in (Limit.TPOT, Limit.WORK) and chunk.tokens:
        assert step_s(COSTS, prompts, chunk.tokens) <= ALPHA * tpot_s
    if chunk.limit is Limit.TTFT:
        assert any(each.due_s < inf for each in prompts)
        assert step_s(COSTS, prompts, chunk.tokens) <= ALPHA * tpot_s + spare
    if chunk.limit is Limit.MEMORY:
        assert room.is_short
