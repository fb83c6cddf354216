"""What an update of a session keeps and frees, and input that is small or odd."""

import pytest

from cluster_core.token_prefix import longest_common_prefix
from prefill_worker import session_input
from prefill_worker.streaming_request import PARKED
from tests.campaign.fuzz.kv_checking_runner import expected_tokens
from tests.integration.streaming_scheduler.sessions import (
    MakeEngine,
    held_blocks,
    park,
    request,
    session_tokens,
    text,
    until,
)

pytestmark = pytest.mark.integration


def test_update_to_the_same_text_invalidates_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine()
    park(engine, "s", text("a", 150))
    blocks = held_blocks(engine, "s")
    engine.scheduler.replace_prompt("s", text("a", 150))
    assert request(engine, "s").status is PARKED
    assert held_blocks(engine, "s") == blocks
    engine.scheduler.close_input("s", [])
    engine.drain()
    assert engine.records["s"].tokens.invalidated_tokens == 0
    assert engine.records["s"].tokens.computed_tokens == 150
    assert engine.answers["s"] == expected_tokens(text("a", 150), 1)


def test_empty_update_frees_everything_and_the_session_goes_on(make_engine: MakeEngine) -> None:
    engine = make_engine()
    park(engine, "s", text("a", 150))
    engine.scheduler.replace_prompt("s", [])
    assert request(engine, "s").status is PARKED
    assert held_blocks(engine, "s") == []
    assert engine.free_blocks() == engine.world.blocks - 1
    assert session_tokens(engine, "s").invalidated_tokens == 149
    engine.turn()
    engine.scheduler.extend_prompt("s", text("b", 30))
    engine.scheduler.close_input("s", [])
    engine.drain()
    assert engine.answers["s"] == expected_tokens(text("b", 30), 1)


def test_update_that_shortens_the_prompt_below_what_is_computed_keeps_whole_published_blocks(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine()
    park(engine, "s", text("a", 150))
    blocks = held_blocks(engine, "s")
    engine.scheduler.replace_prompt("s", text("a", 50))
    # 49 tokens may be kept, and the block in which they end is published: 3 blocks of 16 are left.
    assert held_blocks(engine, "s") == blocks[:3]
    assert session_tokens(engine, "s").invalidated_tokens == 149 - 48
    engine.scheduler.close_input("s", [])
    engine.drain()
    assert engine.answers["s"] == expected_tokens(text("a", 50), 1)


def test_update_in_a_block_that_nobody_else_reads_keeps_its_tokens(make_engine: MakeEngine) -> None:
    engine = make_engine()
    park(engine, "s", text("a", 60))
    blocks = held_blocks(engine, "s")
    engine.scheduler.replace_prompt("s", text("a", 55) + text("b", 20))
    assert held_blocks(engine, "s") == blocks
    assert session_tokens(engine, "s").invalidated_tokens == 4
    engine.scheduler.close_input("s", [])
    engine.drain()
    assert engine.answers["s"] == expected_tokens(text("a", 55) + text("b", 20), 1)


def test_published_blocks_are_never_written(make_engine: MakeEngine) -> None:
    engine = make_engine()
    park(engine, "s", text("a", 150))
    engine.scheduler.replace_prompt("s", text("a", 40) + text("b", 110))
    until(engine, lambda: request(engine, "s").status is PARKED)
    engine.add("other", text("a", 150))
    engine.drain()
    assert engine.answers["other"] == expected_tokens(text("a", 150), 1)
    (new,) = [new for output in engine.outputs for new in output.scheduled_new_reqs if new.req_id == "other"]
    assert new.num_computed_tokens == 144, "all that the session had published is found, and right"


def test_a_shared_prefix_is_computed_once(make_engine: MakeEngine) -> None:
    engine = make_engine()
    park(engine, "first", text("a", 161))
    engine.open("second", text("a", 161))
    until(engine, lambda: request(engine, "second").status is PARKED)
    assert session_tokens(engine, "second").reused_tokens == 144
    assert session_tokens(engine, "second").computed_tokens == 16
    for name in ("first", "second"):
        engine.scheduler.close_input(name, [])
    engine.drain()
    assert engine.answers["first"] == engine.answers["second"] == expected_tokens(text("a", 161), 1)


def test_append_of_nothing_changes_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine()
    park(engine, "s", text("a", 50))
    blocks = held_blocks(engine, "s")
    engine.scheduler.extend_prompt("s", [])
    assert request(engine, "s").status is PARKED
    assert held_blocks(engine, "s") == blocks
    assert session_tokens(engine, "s").inputs == 1
    engine.scheduler.close_input("s", [])
    engine.drain()
    assert engine.records["s"].tokens.computed_tokens == 50


@pytest.mark.parametrize("every", [1, 7, 1000], ids="a step every {}".format)
@pytest.mark.parametrize("v2", [False, True])
def test_a_thousand_appends_of_one_token_compute_every_token_once(
    make_engine: MakeEngine, v2: bool, every: int
) -> None:
    engine = make_engine(v2=v2, blocks=80, token_budget=256)
    engine.open("s", [])
    for index, token in enumerate(text("a", 1000)):
        engine.scheduler.extend_prompt("s", [token])
        if index % every == 0:
            engine.turn()
    engine.scheduler.close_input("s", [])
    engine.drain()
    record = engine.records["s"]
    assert engine.answers["s"] == expected_tokens(text("a", 1000), 1)
    assert (record.tokens.inputs, record.tokens.computed_tokens, record.tokens.invalidated_tokens) == (1000, 1000, 0)
    assert len(record.events) <= 128


def test_an_append_is_compared_with_nothing(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt may be long, and its appends many."""
    compared: list[int] = []

    def counted(first: list[int], second: list[int]) -> int:
        compared.append(min(len(first), len(second)))
        return longest_common_prefix(first, second)

    # Work is counted.
    monkeypatch.setattr(session_input, "longest_common_prefix", counted)
    engine = make_engine()
    park(engine, "s", text("a", 50))
    for end in range(51, 61):
        engine.scheduler.extend_prompt("s", text("a", end)[-1:])
        engine.turn()
    engine.scheduler.close_input("s", text("a", 65)[60:])
    engine.drain()
    assert compared == []
    assert engine.answers["s"] == expected_tokens(text("a", 65), 1)


@pytest.mark.parametrize("prompt", [[], [3], text("a", 50)], ids=lambda prompt: f"{len(prompt)} tokens")
def test_finish_right_after_open(make_engine: MakeEngine, prompt: list[int]) -> None:
    engine = make_engine()
    engine.open("s", prompt, 3)
    engine.scheduler.close_input("s", [9])
    engine.drain()
    assert engine.answers["s"] == expected_tokens([*prompt, 9], 3)


@pytest.mark.parametrize("depth", [1, 2])
def test_finish_without_closing_text_computes_the_token_held_back(make_engine: MakeEngine, depth: int) -> None:
    engine = make_engine(depth=depth)
    park(engine, "s", text("a", 50), max_tokens=3)
    engine.scheduler.close_input("s", [])
    engine.drain()
    assert engine.answers["s"] == expected_tokens(text("a", 50), 3)
    assert engine.records["s"].tokens.computed_tokens == 50 + (3 - 1)


def test_nothing_is_sampled_while_the_input_is_open(make_engine: MakeEngine) -> None:
    engine = make_engine()
    park(engine, "s", text("a", 50))
    assert not any(engine.turn() for _ in range(3)), "there is nothing to do"
    assert engine.answers == {}
    assert not engine.scheduler.has_unfinished_requests()
