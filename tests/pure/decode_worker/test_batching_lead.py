"""The lead of a batch: whose prefix the others join by, and when it changes."""

import random
from collections.abc import Callable

import pytest

from decode_worker import chunk_hashes
from decode_worker.batch_members import Reason
from decode_worker.batching import Batching
from decode_worker.stop_policies import POLICIES, PolicySettings
from tests.planting import planted
from tests.pure.decode_worker.batch_steps import BOUND_S, Batch, Threshold, admit


def two_groups_take_turns() -> None:
    """A group that always has more waiting holds the other one only for its share of the bound, half of it."""
    batch = Batch(places=2)
    batch.arrive("aaa.1", "aaa.2", "bbb.1", "bbb.2", *[f"aaa.{number}" for number in range(3, 40)])
    assert batch.step() == [("aaa.1", Reason.IDLE), ("aaa.2", Reason.POLICY)]
    admitted = []
    for _ in range(20):
        batch.end(batch.running[0])
        admitted += batch.step()
        if admitted[-1][0].startswith("b"):
            break
    assert admitted[-1] == ("bbb.1", Reason.TURN)
    assert batch.now_s <= BOUND_S / 2 + 3 * Batch.STEP_S
    assert batch.tip() == 3, "the cohort before counts no more"
    batch.end(batch.running[0])
    assert batch.step() == [("bbb.2", Reason.POLICY)]
    assert batch.batching.counters.longest_held_s <= BOUND_S


def a_mixed_batch_finds_back() -> None:
    """Strangers run because nothing else was there; then a long prefix waits, and the batch turns to it at once."""
    batch = Batch(Threshold(99), places=3)
    batch.arrive("xy.1", "zw.1", "uv.1")
    assert len(batch.names()) == 3
    assert batch.tip() == 0
    batch.policy = batch.batching.policy = Threshold()
    batch.arrive("q", "aaaa.1", "aaaa.2", "aaaa.3")
    batch.end("xy.1")
    assert batch.step() == [("aaaa.1", Reason.TURN)]
    batch.end("zw.1", "uv.1")
    assert batch.names() == ["aaaa.2", "aaaa.3"]
    assert batch.tip() == 4


SCENARIOS: dict[Callable[[], None], str] = {
    two_groups_take_turns: "_held_too_long",
    a_mixed_batch_finds_back: "_brings_more",
}


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.__name__)
def test_the_lead_changes(scenario: Callable[[], None]) -> None:
    scenario()


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.__name__)
def test_a_lead_that_never_changes_is_noticed(scenario: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, Batching, SCENARIOS[scenario], lambda self, *arguments: None)
    with pytest.raises(AssertionError):
        scenario()


def test_the_best_by_shared_prefix_joins_before_earlier_ones() -> None:
    batch = Batch(POLICIES["greedy"](PolicySettings(), random.Random(0)))
    batch.arrive("abcd.1", "x", "ab.2", "abcd.3", "abcd.2")
    assert batch.names() == ["abcd.1", "ab.2", "abcd.3", "abcd.2"]
    assert batch.tip() == 2


def test_a_batch_that_shrinks_to_one_takes_who_shares_what_others_want() -> None:
    """The rest of a single prompt is nobody's loss: the peers join although its own tail goes from the tip."""
    batch = Batch()
    batch.arrive("aabbbb", "aacccc")
    assert batch.names() == ["aabbbb", "aacccc"]
    batch.end("aacccc")
    assert batch.tip() == 6
    batch.arrive("aadddd")
    assert batch.names() == ["aadddd"]
    assert batch.tip() == 2
    assert batch.batching.counters.lost_chunks == 0


def test_prompts_of_a_hundred_thousand_tokens() -> None:
    tokens = list(range(100_000))
    batching = Batching(Threshold(), BOUND_S)
    for name, changed in (("one", 99_999), ("other", 10), ("peer", 99_990)):
        prompt = [*tokens[:changed], 0, *tokens[changed + 1 :]]
        batching.insert(name, chunk_hashes.of_tokens(prompt, 16), 0.0)
    plan = batching.plan(0.0, 8)
    assert plan.request_ids == ["one", "peer"]
    batching.settle(plan, plan.request_ids, [], 0.0)
    assert batching.tree.tip_chunks == 99_990 // 16


def test_a_lead_that_finds_no_memory_changes_nothing() -> None:
    batching = Batching(Threshold(0), BOUND_S)
    for name in ("a1", "a2"):
        batching.insert(name, (1, 2), 0.0)
    plan = batching.plan(0.0, 2)
    batching.settle(plan, plan.request_ids, (), 0.0)
    cohort, tip = batching.tree.active_requests, batching.tree.tip_chunks
    assert cohort
    for name in ("b1", "b2"):
        batching.insert(name, (5, 6), 0.1)
    admit(batching, 0.1, 1)
    plan = batching.plan(0.1 + BOUND_S * 0.8, 1)
    assert plan.joining[0].reason is Reason.TURN
    assert batching.tree.tip_chunks == 2
    batching.settle(plan, (), (), 0.1 + BOUND_S * 0.8)
    assert (batching.tree.active_requests, batching.tree.tip_chunks) == (cohort, tip)
    assert batching.tree.candidate("b1").tip_after == 0
    batching.tree.check_invariants()
