"""What people are told of the tiers: each counter under its name, and the hottest prefixes in order."""

from dataclasses import fields
from itertools import count
from typing import Any

from kv_transfer.blocks import BlockHash
from kv_transfer.tiers import report as tier_report
from kv_transfer.tiers.prefix_tiers import PrefixTiers
from kv_transfer.tiers.settings import TierSettings, make_tiers
from kv_transfer.tiers.tier_terms import Admission, Refusal, TierCounters, TierRules

BLOCK_SIZE = 16
# A block is used once.
_blocks = count()


def make(host_slots: int = 0, **settings: Any) -> PrefixTiers:
    rules = TierRules(Admission.EVERYTHING, promotion=False)
    given = TierSettings(filter_entries=1024, rules=rules, **settings)
    return make_tiers(given, 64, host_slots, lambda block: False)


def block_hash(name: str) -> BlockHash:
    return name.encode().ljust(32, b"\0")


def ask(tiers: PrefixTiers, prompt: str, times: int = 1) -> list[BlockHash]:
    """One block for each letter, which covers those before it; what is not on the device is there then."""
    hashes = [block_hash(prompt[:end]) for end in range(1, len(prompt) + 1)]
    for _ in range(times):
        tiers.accessed(hashes)
        first = len(tiers.match(hashes).device)
        tiers.cached(hashes, first, [next(_blocks) for _ in hashes[first:]])
    return hashes


def hottest(tiers: PrefixTiers, at_most: int = 10, **limits: int) -> list[tuple[int, int]]:
    """(blocks, frequency) of each."""
    found = tier_report.hottest_prefixes(tiers, BLOCK_SIZE, at_most, **limits)
    return [(each.tokens // BLOCK_SIZE, each.frequency) for each in found]


def test_the_report_has_every_counter() -> None:
    tiers, numbers = make(host_slots=5), count(1)
    counters = {field.name: next(numbers) for field in fields(TierCounters) if field.name != "refused"}
    refused = {reason: next(numbers) for reason in Refusal}
    tiers.counters = TierCounters(**counters, refused=refused)

    report = tier_report.tier_report(tiers, 1000, 64)

    told = {getattr(report, field.name) for field in fields(report) if field.name != "refused_offers"}
    # Seconds of copies are for who places requests, with what they are the seconds of.
    del counters["timed"]
    assert set(counters.values()) <= told
    assert report.refused_offers == {reason.value: number for reason, number in refused.items()}
    assert (report.copied_out_bytes, report.copied_back_bytes) == (
        counters["copied_out"] * 1000,
        counters["copied_back"] * 1000,
    )
    assert (report.device_capacity_blocks, report.host_capacity_blocks) == (64, 5)


def test_the_report_has_the_blocks_of_each_tier() -> None:
    tiers = make(host_slots=5)
    hashes = ask(tiers, "abc")
    copy = tiers.worth_copying(hashes[:2])
    assert copy is not None
    tiers.copied_out(copy)

    report = tier_report.tier_report(tiers, 1000, 64)

    assert (report.device_blocks, report.host_blocks, report.copied_out_blocks) == (3, 2, 2)


def test_a_report_does_not_change_any_more() -> None:
    tiers = make()
    report = tier_report.tier_report(tiers, 1000, 64)

    tiers.counters.refused[Refusal.FREQUENCY] += 1

    assert report.refused_offers["frequency"] == 0


def test_the_hottest_prefix_comes_first_and_not_more_than_asked_for() -> None:
    tiers = make()
    ask(tiers, "a", 3)
    ask(tiers, "b", 9)
    ask(tiers, "c", 1)

    assert hottest(tiers) == [(1, 9), (1, 3), (1, 1)]
    assert hottest(tiers, 2) == [(1, 9), (1, 3)]
    assert hottest(make()) == []


def test_a_prefix_that_others_share_is_listed_beside_them() -> None:
    tiers = make()
    ask(tiers, "abx", 4)
    ask(tiers, "aby", 2)

    assert hottest(tiers) == [(2, 6), (3, 4), (3, 2)]


def test_a_prefix_counts_its_blocks_in_both_tiers_from_its_beginning() -> None:
    tiers = make(host_slots=8)
    hashes = ask(tiers, "abcd")
    copy = tiers.worth_copying(hashes[:3])
    assert copy is not None
    tiers.copied_out(copy)

    found = {each.tokens: each for each in tier_report.hottest_prefixes(tiers, BLOCK_SIZE, 10)}

    assert {tokens: (each.device_blocks, each.host_blocks) for tokens, each in found.items()} == {
        3 * BLOCK_SIZE: (3, 3),
        4 * BLOCK_SIZE: (4, 3),
    }
    assert found[3 * BLOCK_SIZE].hash == b"a\0\0\0".hex()
    assert found[4 * BLOCK_SIZE].hash == b"abcd".hex()


def test_who_leaves_first_by_its_group_comes_last() -> None:
    tiers = make(eviction="2q")
    [often] = ask(tiers, "a")
    [block] = tiers.match([often]).device
    tiers.left_device(block)
    ask(tiers, "a")
    for name in "bcdefghijklmnopqrstu":
        ask(tiers, name)

    assert hottest(tiers, 1) == [(1, 2)]


def test_not_more_runs_are_looked_at_than_the_limit() -> None:
    tiers = make()
    for name in ("ax", "ay", "b"):
        ask(tiers, name)

    assert sorted(hottest(tiers, most_runs=2)) == [(1, 1), (1, 2)]
