"""When a pull counts as too late, on clocks that disagree, and what is reported of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster_core.clock import UnixMs
from cluster_core.engine_jobs import HandoffOutcome, HandoffReport
from cluster_core.errors import InvalidInputError
from kv_transfer.handoff.lease_params import decode_params, encode_params
from kv_transfer.handoff.rules import MAX_DEADLINE_SHARE, PullLedger, effective_deadline_s, is_late, stamp_deadline

NOW = UnixMs(1_700_000_000_000)


def test_a_deadline_lies_its_seconds_after_the_prefill() -> None:
    assert stamp_deadline(NOW, 1.5) == NOW + 1500


def test_late_begins_at_the_deadline_itself() -> None:
    assert not is_late(7.001, 7.0)
    assert is_late(7.0, 7.0)
    assert is_late(6.999, 7.0)


def test_a_deadline_is_kept_on_the_monotonic_clock_from_its_arrival_on() -> None:
    assert effective_deadline_s(stamp_deadline(NOW, 15), UnixMs(NOW + 4_000), 100.0, 15) == 111.0


def test_a_stamp_from_a_clock_ahead_is_cut_to_the_time_of_arrival() -> None:
    ahead = stamp_deadline(UnixMs(NOW + 60_000), 15)

    assert effective_deadline_s(ahead, NOW, 100.0, 15) == 115.0


def test_a_stamp_from_a_clock_behind_stays_as_early_as_it_is() -> None:
    behind = stamp_deadline(UnixMs(NOW - 60_000), 15)

    assert effective_deadline_s(behind, NOW, 100.0, 15) == 55.0
    assert is_late(effective_deadline_s(behind, NOW, 100.0, 15), 100.0)


@given(
    lease_s=st.floats(6, 3600),
    share=st.floats(0.01, MAX_DEADLINE_SHARE),
    skew_ms=st.integers(-(10**9), 10**9),
    received_share=st.floats(0, 1),
    pull_ms=st.integers(0, 10**7),
)
def test_no_pull_within_its_deadline_ends_after_the_lease_whatever_the_clocks_say(
    lease_s: float, share: float, skew_ms: int, received_share: float, pull_ms: int
) -> None:
    """True time runs from the end of the prefill; the prefill host's clock is `skew_ms` ahead of the decode host's.

    The hand-off arrives within the part of the lease that the deadline leaves free.
    """
    deadline_s = lease_s * share
    received_ms = int((lease_s - deadline_s) * 1000 * received_share)
    stamped = stamp_deadline(UnixMs(NOW + skew_ms), deadline_s)

    until_s = effective_deadline_s(stamped, UnixMs(NOW + received_ms), received_ms / 1000, deadline_s)
    ended_s = (received_ms + pull_ms) / 1000

    if not is_late(until_s, ended_s):
        assert ended_s <= lease_s


@given(skew_ms=st.integers(0, 5_000), received_ms=st.integers(0, 9_000))
def test_a_prompt_pull_is_in_time_despite_a_clock_that_is_somewhat_off(skew_ms: int, received_ms: int) -> None:
    stamped = stamp_deadline(UnixMs(NOW - skew_ms), 15)

    assert not is_late(effective_deadline_s(stamped, UnixMs(NOW + received_ms), 100.0, 15), 100.5)


def test_a_pull_that_ended_is_reported_once_with_what_crossed() -> None:
    ledger = PullLedger()
    ledger.start("a", 10.0, tokens=64, kv_bytes=4096)
    ledger.end("a", 10.25, failed=False, descriptors_per_byte=1 / 512)

    assert ledger.take("a") == HandoffReport(HandoffOutcome.PULLED, 4096, 64, 250.0, 8)
    assert ledger.take("a").outcome is HandoffOutcome.LOCAL
    assert len(ledger) == 0


def test_a_failed_pull_is_reported_as_recomputed_with_nothing_crossed() -> None:
    ledger = PullLedger()
    ledger.start("a", 10.0, tokens=64, kv_bytes=4096)
    ledger.end("a", 11.0, failed=True)

    assert ledger.take("a") == HandoffReport(HandoffOutcome.RECOMPUTED, 0, 0, 1000.0)


def test_a_second_end_of_a_pull_changes_nothing() -> None:
    ledger = PullLedger()
    ledger.start("a", 0.5, tokens=1, kv_bytes=1)
    ledger.end("a", 1.0, failed=False)
    ledger.end("a", 9.0, failed=True)

    assert ledger.take("a") == HandoffReport(HandoffOutcome.PULLED, 1, 1, 500.0)


def test_a_dropped_pull_is_reported_as_recomputed() -> None:
    ledger = PullLedger()
    ledger.drop("a")

    assert ledger.take("a") == HandoffReport(HandoffOutcome.RECOMPUTED)
    assert len(ledger) == 0


def test_a_request_without_a_pull_found_its_blocks_here() -> None:
    assert PullLedger().take("a") == HandoffReport(HandoffOutcome.LOCAL)


def test_the_end_of_an_unknown_pull_leaves_nothing_behind() -> None:
    ledger = PullLedger()
    ledger.end("a", 1.0, failed=False)

    assert len(ledger) == 0


@given(st.lists(st.tuples(st.sampled_from(["start", "drop", "end", "take"]), st.sampled_from("abc")), max_size=40))
def test_a_ledger_is_empty_once_every_request_is_forgotten(operations: list[tuple[str, str]]) -> None:
    ledger = PullLedger()
    for step, (operation, name) in enumerate(operations):
        match operation:
            case "start":
                ledger.start(name, float(step), 1, 1)
            case "end":
                ledger.end(name, float(step), failed=step % 2 == 0)
            case "drop":
                ledger.drop(name)
            case _:
                ledger.take(name)
    assert len(ledger) <= 6
    for name in "abc":
        ledger.forget(name)

    assert len(ledger) == 0


@given(
    st.dictionaries(
        st.text(max_size=8),
        st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.just([[1, 2], [3]]),
        max_size=4,
    )
)
def test_lease_params_come_back_as_they_were(params: dict[str, object]) -> None:
    assert decode_params(encode_params(params)) == params


@pytest.mark.parametrize("encoded", [b"", b"{", b"\xff\xfe\x00", b"[1]", b"7", b"null", b'"text"'])
def test_bytes_that_are_no_lease_params_are_refused(encoded: bytes) -> None:
    with pytest.raises(InvalidInputError, match=r"^handoff\.connector_params: "):
        decode_params(encoded)
