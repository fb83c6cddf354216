"""The longest common prefix against a plain loop, and a session's ledger."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster_core.engine_jobs import SessionEventKind, SessionMode
from cluster_core.token_prefix import longest_common_prefix
from prefill_worker.session_ledger import EVENTS_KEPT, SessionLedger

TOKENS = st.lists(st.integers(0, 2), max_size=40)
# Around the stride in which prefixes are compared.
LENGTHS = [0, 1, 511, 512, 513, 1023, 1024, 1025, 5000]


def plain_prefix(first: list[int], second: list[int]) -> int:
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count


def opened() -> SessionLedger:
    return SessionLedger(SessionMode.UPDATE, 100.0)


def kinds(ledger: SessionLedger) -> list[str]:
    return [event.kind.value for event in ledger.record().events]


@given(first=TOKENS, second=TOKENS)
def test_prefix_of_short_lists_is_that_of_a_plain_loop(first: list[int], second: list[int]) -> None:
    assert longest_common_prefix(first, second) == plain_prefix(first, second)


@given(
    shared=st.integers(0, 2000),
    tails=st.tuples(st.integers(0, 1200), st.integers(0, 1200)),
    flip=st.one_of(st.none(), st.integers(0, 3200)),
)
def test_prefix_of_long_lists_is_that_of_a_plain_loop(shared: int, tails: tuple[int, int], flip: int | None) -> None:
    first, second = [1] * (shared + tails[0]), [1] * shared + [2] * tails[1]
    if flip is not None and flip < len(second):
        second[flip] = 3
    assert longest_common_prefix(first, second) == plain_prefix(first, second)
    assert longest_common_prefix(second, first) == plain_prefix(first, second)


@pytest.mark.parametrize("length", LENGTHS)
def test_prefix_ends_where_the_tokens_do(length: int) -> None:
    assert longest_common_prefix([7] * length, [7] * length) == length
    assert longest_common_prefix([7] * length, [7] * length + [8]) == length
    assert longest_common_prefix([7] * length + [8], [7] * length + [9]) == length


def test_a_session_that_appends_counts_what_came_and_what_was_computed() -> None:
    ledger = opened()
    ledger.opened(10)
    ledger.scheduled(4, 6, 10, 101.0)
    ledger.received(5, 15)
    ledger.received(0, 15)
    ledger.scheduled(0, 5, 5, 102.0)
    ledger.closed(2, 17)
    ledger.scheduled(0, 2, 2, 103.0)
    ledger.finish(104.0)
    counted = ledger.record().tokens
    assert (counted.received_tokens, counted.prompt_tokens, counted.inputs) == (17, 17, 2)
    assert (counted.reused_tokens, counted.computed_tokens, counted.invalidated_tokens) == (4, 13, 0)
    assert counted.ready_tokens == 17


def test_an_update_counts_what_it_kept_and_what_it_threw_away() -> None:
    ledger = opened()
    ledger.opened(10)
    ledger.scheduled(0, 10, 10, 101.0)
    ledger.invalidated(6, 102.0)
    ledger.invalidated(0, 103.0)
    ledger.kept(4)
    ledger.received(9, 9)
    counted = ledger.record().tokens
    assert (counted.received_tokens, counted.prompt_tokens) == (19, 9)
    assert (counted.reused_tokens, counted.invalidated_tokens) == (4, 6)
    assert kinds(ledger).count("invalidated") == 1, "nothing thrown away is no event"


def test_events_tell_when_it_waited_and_when_it_was_served() -> None:
    ledger = opened()
    ledger.opened(10)
    ledger.wait(100.5)
    ledger.scheduled(0, 5, 5, 101.0)
    ledger.scheduled(0, 5, 5, 102.0)
    ledger.caught_up(103.0)
    ledger.wait(104.0)
    ledger.scheduled(0, 1, 1, 105.0)
    ledger.finish(106.0)
    ledger.finish(107.0)
    assert kinds(ledger) == ["queued", "scheduled", "kv_on_device", "queued", "scheduled", "finished"]
    assert [event.at_s for event in ledger.record().events] == [0.0, 1.0, 3.0, 4.0, 5.0, 6.0]


@pytest.mark.parametrize("swapped", [False, True])
def test_a_preempted_session_is_resumed_when_it_is_scheduled_again(swapped: bool) -> None:
    ledger = opened()
    ledger.opened(10)
    ledger.scheduled(0, 10, 10, 101.0)
    ledger.preempt(swapped=swapped, tokens=10, now_s=102.0)
    ledger.scheduled(8, 2, 10, 103.0)
    ledger.scheduled(0, 1, 1, 104.0)
    assert not ledger.preempted
    record = ledger.record()
    assert (record.preemptions_swap, record.preemptions_recompute) == ((1, 0) if swapped else (0, 1))
    assert kinds(ledger)[2:] == ["preempted_swap" if swapped else "preempted_recompute", "resumed"]
    assert record.events[-1].tokens == 8


def test_a_very_long_session_tells_its_first_and_its_last_events() -> None:
    ledger = opened()
    for index in range(1000):
        ledger.note(SessionEventKind.KV_ON_DEVICE, 100.0 + index, index)
    tokens = [event.tokens for event in ledger.record().events]
    assert tokens == [*range(EVENTS_KEPT), *range(1000 - EVENTS_KEPT, 1000)]


def test_books_that_do_not_change_keep_their_snapshot() -> None:
    """Who watches the progress compares snapshots by identity."""
    ledger = opened()
    ledger.opened(10)
    ledger.ready(3)
    before = ledger.tokens
    ledger.ready(3)
    ledger.invalidated(0, 101.0)
    assert ledger.tokens is before
    ledger.ready(4)
    assert ledger.tokens is not before
