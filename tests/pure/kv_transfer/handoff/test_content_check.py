"""Which hand-offs are checked, and what scheduler and workers make of their checksums."""

import json
from random import Random

import pytest

from kv_transfer.handoff.content_check import (
    Checksums,
    ContentChecks,
    ContentOrders,
    ContentReport,
    ContentSampling,
)


def sampling(share: float = 1.0, ranks: int = 1) -> ContentSampling:
    return ContentSampling(share, block_size=4, ranks=ranks, rng=Random(0))


def test_the_share_of_leases_that_are_checked() -> None:
    content = sampling(0.25)
    assert 200 < sum(content.lease(f"r{i}", [1, 2], 8) for i in range(1000)) < 300
    assert not any(sampling(0.0).lease("r", [1], 4) for _ in range(100))


@pytest.mark.parametrize(("tokens", "full"), [(3, None), (4, [7]), (7, [7]), (9, [7, 8])])
def test_only_full_blocks_are_checked(tokens: int, full: list[int] | None) -> None:
    content = sampling()
    assert content.lease("r", [7, 8, 9], tokens) is (full is not None)
    assert content.take_orders().take.get("r") == full
    assert content.take_orders() == ContentOrders(), "once"


def test_the_checksums_of_a_lease_are_there_when_all_ranks_have_told_them() -> None:
    content = sampling(ranks=2)
    content.lease("r", [7], 4)
    content.lease("gone", [8], 4)
    content.take_in(ContentReport({"r": {1: [5]}}))
    assert content.taken("r") is None
    content.take_in(ContentReport({"r": {0: [4]}}))
    assert content.taken("r") == {0: [4], 1: [5]}
    assert content.taken("r") is None
    content.forget("gone")
    assert set(content.take_orders().take) == {"r"}
    content.take_in(ContentReport({"gone": {0: [4], 1: [5]}}))
    assert content.taken("gone") is None
    # Checksums of a lease that was forgotten are visible nowhere else.
    assert not content._taken, "nothing is kept of what nobody waits for"


def test_a_pull_counts_once_when_all_ranks_have_compared_it() -> None:
    content = sampling(ranks=2)
    content.take_in(ContentReport(verified={"a", "b"}, unlike={"a"}))
    content.take_in(ContentReport(verified={"a", "b"}))
    assert (content.verified, content.unlike) == (0, 0)
    for name in ("a", "b", "never compared"):
        content.ended(name)
    assert (content.verified, content.unlike) == (2, 1)


def test_reports_of_ranks_add_up() -> None:
    one = ContentReport({"r": {0: [1]}}, {"a", "b"}, {"a"})
    other = ContentReport({"r": {1: [2]}, "s": {1: [3]}}, {"a"})
    assert one + other == ContentReport({"r": {0: [1], 1: [2]}, "s": {1: [3]}}, {"a", "b"}, {"a"})
    assert not ContentReport()


@pytest.mark.parametrize("is_damaged", [False, True])
def test_what_was_pulled_is_compared_with_what_was_sent(is_damaged: bool) -> None:
    """Blocks 1 to 4 are pulled into blocks 9, 8, 7, 6, of which the first is cached; the last is not full."""
    sender, receiver = sampling(), sampling()
    sender.lease("sent", [1, 2, 3, 4, 5], tokens=4 * 4 + 1)
    sending = ContentChecks(lambda blocks: [100 * block for block in blocks], 0)
    sending.carry_out(sender.take_orders())
    sender.take_in(sending.report())
    # They travel as JSON.
    sent = json.loads(json.dumps(sender.taken("sent")))
    assert sent == {"0": [100, 200, 300, 400]}

    landed = {8: 200, 7: 301 if is_damaged else 300, 6: 400}
    receiver.pull("pulled", sent, [9, 8, 7, 6, 5], pulled={8, 7, 6, 5})
    checks = ContentChecks(lambda blocks: [landed[block] for block in blocks], 0)
    checks.carry_out(receiver.take_orders())
    assert checks.landed("pulled") is not is_damaged
    assert checks.landed("pulled"), "it is forgotten"
    receiver.take_in(checks.report())
    receiver.ended("pulled")
    assert (receiver.verified, receiver.unlike) == (1, is_damaged)


@pytest.mark.parametrize("sent", [None, True, False, {}, {"0": [1]}])
def test_a_hand_off_without_checksums_of_as_many_ranks_is_not_checked(sent: Checksums | None) -> None:
    receiver = sampling(ranks=2)
    receiver.pull("r", sent, [1], {1})
    checks = ContentChecks(_none, 0)
    checks.carry_out(receiver.take_orders())
    assert checks.landed("r")
    assert not checks.report()


def test_a_pull_that_is_given_up_is_not_compared() -> None:
    checks = ContentChecks(_none, 0)
    checks.carry_out(ContentOrders(compare={"r": {0: [(1, 0)]}}))
    checks.forget("r")
    assert checks.landed("r")


def _none(blocks: object) -> list[int]:
    raise AssertionError(f"{blocks} are not to be looked at")
