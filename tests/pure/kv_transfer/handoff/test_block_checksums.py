"""Checksums of blocks: what they tell apart; and what scheduler and workers make of them."""

import json
from random import Random

import pytest
import torch

from kv_transfer.handoff.block_checksums import (
    BlockChecksums,
    Checksums,
    ContentChecks,
    ContentOrders,
    ContentReport,
    ContentSampling,
)

BLOCKS, BYTES = 12, 200


def memory(seed: int = 1, layers: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-128, 128, (BLOCKS, BYTES), dtype=torch.int8, generator=generator) for _ in range(layers)]


def test_equal_blocks_have_equal_checksums_wherever_they_lie_and_however_many_are_asked_for() -> None:
    views = memory()
    copied = [torch.zeros(BLOCKS, BYTES, dtype=torch.int8) for _ in views]
    for view, copy in zip(views, copied, strict=True):
        copy[[5, 0, 7]] = view[[2, 3, 4]]
    sent, landed = BlockChecksums(views), BlockChecksums(copied)
    assert sent.of([2, 3, 4]) == landed.of([5, 0, 7]) == [*sent.of([2]), *sent.of([3]), *sent.of([4])]
    assert sent.of([]) == []


@pytest.mark.parametrize("size", [8, 13, 200])
def test_one_bit_anywhere_is_noticed(size: int) -> None:
    views = [view[:, :size].contiguous() for view in memory()]
    checksums, rng = BlockChecksums(views), Random(size)
    (before,) = checksums.of([3])
    for _ in range(100):
        view, place, bit = rng.choice(views), rng.randrange(size), rng.randrange(8)
        view[3, place] ^= 1 << bit if bit < 7 else -128
        (changed,) = checksums.of([3])
        assert changed != before
        view[3, place] ^= 1 << bit if bit < 7 else -128
    assert checksums.of([3]) == [before]


def test_words_and_layers_that_change_places_are_noticed() -> None:
    views = memory()
    checksums = BlockChecksums(views)
    (before,) = checksums.of([1])
    views[0][1, :16] = views[0][1, :16].roll(8)
    (rolled,) = checksums.of([1])
    views[0][1], views[1][1] = views[1][1].clone(), views[0][1].clone()
    assert len({before, rolled, *checksums.of([1])}) == 3


def test_many_blocks_are_taken_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    checksums = BlockChecksums(memory())
    whole = checksums.of(list(range(BLOCKS)))
    monkeypatch.setattr("kv_transfer.handoff.block_checksums._AT_ONCE_BYTES", 2 * BYTES)
    assert checksums.of(list(range(BLOCKS))) == whole


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
    content.take_in(ContentReport({"r": {1: [5]}}))
    assert content.taken("r") is None
    content.take_in(ContentReport({"r": {0: [4]}}))
    assert content.taken("r") == {0: [4], 1: [5]}
    assert content.taken("r") is None
    content.take_in(ContentReport({"gone": {0: [4], 1: [5]}}))
    content.forget("gone")
    assert content.taken("gone") is None


def test_reports_of_ranks_add_up() -> None:
    one = ContentReport({"r": {0: [1]}}, {"a", "b"}, {"a"})
    other = ContentReport({"r": {1: [2]}, "s": {1: [3]}}, {"a"})
    assert one + other == ContentReport({"r": {0: [1], 1: [2]}, "s": {1: [3]}}, {"a", "b"}, {"a"})
    assert not ContentReport()


def sent_and_pulled(*, damaged: bool) -> ContentSampling:
    """Blocks 1 to 4 of one memory are pulled into blocks 9, 8, 7, 6 of another one, which has the first cached."""
    views, tokens = memory(), 4 * 4 + 1
    sender, receiver = sampling(), sampling()
    sender.lease("sent", [1, 2, 3, 4, 5], tokens)
    sending = ContentChecks(BlockChecksums(views), 0)
    sending.carry_out(sender.take_orders())
    sender.take_in(sending.report())
    # They travel as JSON.
    wire: dict[str, list[int]] = json.loads(json.dumps(sender.taken("sent")))

    landed = memory(seed=2)
    for view, copy in zip(views, landed, strict=True):
        copy[[8, 7, 6]] = view[[2, 3, 4]]
    receiver.pull("pulled", wire, [9, 8, 7, 6, 5], pulled={8, 7, 6, 5})
    checks = ContentChecks(BlockChecksums(landed), 0)
    checks.carry_out(receiver.take_orders())
    if damaged:
        landed[2][7, 5] += 1
    assert checks.landed("pulled") is not damaged
    assert checks.landed("pulled"), "it is forgotten"
    receiver.take_in(checks.report())
    return receiver


def test_what_was_pulled_is_what_was_sent() -> None:
    receiver = sent_and_pulled(damaged=False)
    assert (receiver.verified, receiver.unlike) == (1, 0)


def test_a_block_that_landed_otherwise_is_noticed() -> None:
    receiver = sent_and_pulled(damaged=True)
    assert (receiver.verified, receiver.unlike) == (1, 1)


@pytest.mark.parametrize("sent", [None, True, False, {}, {"0": [1]}])
def test_a_hand_off_without_checksums_of_as_many_ranks_is_not_checked(sent: Checksums | None) -> None:
    receiver = sampling(ranks=2)
    receiver.pull("r", sent, [1], {1})
    checks = ContentChecks(BlockChecksums(memory()), 0)
    checks.carry_out(receiver.take_orders())
    assert checks.landed("r")
    assert not checks.report()


def test_a_pull_that_is_given_up_is_not_compared() -> None:
    checks = ContentChecks(BlockChecksums(memory()), 0)
    checks.carry_out(ContentOrders(compare={"r": {0: [(1, 0)]}}))
    checks.forget("r")
    assert checks.landed("r")
