"""Both tiers by scenario: what is copied to host memory, what is promoted from it, and what is refused."""

from dataclasses import replace
from unittest import mock

from cluster_core.engine_jobs import TenantShare
from kv_transfer.tiers import prefix_tiers
from kv_transfer.tiers.eviction_policies import LeastRecentlyUsed
from kv_transfer.tiers.hotness import HotnessTracker
from kv_transfer.tiers.hotness_filter import HotnessFilter
from kv_transfer.tiers.prefix_tiers import PrefixTiers
from kv_transfer.tiers.promotions import Promotions
from kv_transfer.tiers.tier_terms import Admission, Promotion, Refusal, TierRules
from tests.pure.kv_transfer.tiers.test_radix_tree import hashes_of


def make_tiers(host_slots: int, rules: TierRules) -> PrefixTiers:
    tracker = HotnessTracker(HotnessFilter(1000))
    return PrefixTiers(LeastRecentlyUsed(), tracker, rules, host_slots, lambda block: False)


CHATTING, FLOODING = TenantShare("chatting"), TenantShare("flooding")
EVERYTHING = TierRules(Admission.EVERYTHING, promotion=False)


def test_a_prompt_longer_than_host_memory_does_not_evict_its_own_blocks_in_turn() -> None:
    tiers = make_tiers(3, EVERYTHING)
    hashes = hashes_of((1, 2, 3, 1, 2))
    tiers.accessed(hashes)
    tiers.cached(hashes, 0, range(5))
    copy = tiers.worth_copying(hashes)
    assert copy is not None
    assert copy.blocks == (0, 1, 2)
    tiers.copied_out(copy)
    assert tiers.worth_copying(hashes) is None
    assert tiers.counters.refused[Refusal.HOST_LOCKED] == 2
    assert (tiers.counters.evicted_host, tiers.slots.free) == (0, 0)


def test_what_is_being_copied_is_not_copied_twice() -> None:
    tiers = make_tiers(4, EVERYTHING)
    hashes = hashes_of((1, 2))
    tiers.cached(hashes, 0, range(2))
    copy = tiers.worth_copying(hashes)
    assert copy is not None
    assert tiers.worth_copying(hashes) is None
    tiers.copy_failed(copy)
    assert tiers.slots.free == 4
    assert tiers.worth_copying(hashes) == copy


def test_what_follows_a_copy_under_way_is_copied_without_waiting_for_it() -> None:
    tiers = make_tiers(8, EVERYTHING)
    hashes = hashes_of((1, 2, 1, 2, 1))
    tiers.cached(hashes, 0, range(5))
    first, second, third = (tiers.worth_copying(hashes, 2) for _ in range(3))
    assert first is not None
    assert second is not None
    assert third is not None
    assert [each.blocks for each in (first, second, third)] == [(0, 1), (2, 3), (4,)]
    assert tiers.worth_copying(hashes) is None
    # They may land in any order.
    for copy in (third, first, second):
        tiers.copied_out(copy)
        tiers.check_invariants()
    assert len(tiers.host_slots_of(hashes, 0, 5)) == 5


def test_without_host_memory_nothing_is_copied() -> None:
    tiers = make_tiers(0, EVERYTHING)
    tiers.cached([1], 0, [0])
    assert tiers.worth_copying([1]) is None
    assert tiers.counters.refused[Refusal.HOST_LOCKED] == 1


def test_only_what_was_asked_for_often_enough_is_copied() -> None:
    tiers = make_tiers(4, TierRules(frequency_threshold=2))
    hashes = hashes_of((1, 2, 3))
    tiers.cached(hashes, 0, range(3))
    tiers.accessed(hashes)
    assert tiers.worth_copying(hashes) is None
    assert tiers.counters.refused[Refusal.FREQUENCY] == 1
    tiers.accessed(hashes[:2])
    copy = tiers.worth_copying(hashes)
    assert copy is not None
    assert copy.blocks == (0, 1)


def test_host_blocks_that_nothing_leads_to_any_more_count_as_evicted() -> None:
    tiers = make_tiers(4, EVERYTHING)
    hashes = hashes_of((1, 2, 1))
    tiers.cached(hashes, 0, range(3))
    first, rest = tiers.worth_copying(hashes, 1), tiers.worth_copying(hashes)
    assert first is not None
    assert rest is not None
    tiers.copied_out(rest)
    tiers.copy_failed(first)
    for block in (2, 1):
        tiers.left_device(block)
    assert (tiers.counters.evicted_device, tiers.counters.evicted_host) == (2, 0)
    tiers.left_device(0)
    assert (tiers.counters.evicted_device, tiers.counters.evicted_host) == (3, 2)
    assert tiers.slots.free == 4


def test_what_its_policy_finds_unpromising_is_not_copied() -> None:
    tiers = make_tiers(4, TierRules(frequency_threshold=1))
    tiers.cached([1], 0, [0])
    tiers.accessed([1])
    # The policy of these tiers finds every block promising.
    with mock.patch.object(LeastRecentlyUsed, "is_promising", return_value=False):
        assert tiers.worth_copying([1]) is None
    assert tiers.counters.refused[Refusal.UNPROMISING] == 1
    assert tiers.worth_copying([1]) is not None


def test_host_memory_keeps_what_is_hotter_than_the_newcomer() -> None:
    tiers = make_tiers(1, TierRules(frequency_threshold=1, promotion=False))
    for block, block_hash in enumerate((1, 2)):
        tiers.cached([block_hash], 0, [block])
    tiers.accessed([2])
    tiers.accessed([1])
    copy = tiers.worth_copying([1])
    assert copy is not None
    tiers.copied_out(copy)
    assert tiers.worth_copying([2]) is None
    assert tiers.counters.refused[Refusal.COLDER_THAN_HOST] == 1
    tiers.accessed([2])
    assert tiers.worth_copying([2]) is not None
    assert tiers.match([1]).host == []


def test_a_hot_host_root_is_promoted_in_the_place_of_colder_leaves_only() -> None:
    tiers = make_tiers(4, replace(EVERYTHING, promotion=True))
    hot, cold = hashes_of((1, 2)), hashes_of((2, 2, 2))
    tiers.cached(hot, 0, [0, 1])
    copy = tiers.worth_copying(hot)
    assert copy is not None
    tiers.copied_out(copy)
    for block in (1, 0):
        tiers.left_device(block)
    tiers.accessed(cold)
    tiers.cached(cold, 0, [2, 3, 4])
    assert tiers.promotion() is None, "nothing colder is on the device"
    tiers.accessed(hot)
    assert tiers.promotion() is None, "one in vain: the next is not looked for"
    promotion = tiers.promotion()
    assert promotion == Promotion(tuple(hot), 0, copy.slots)
    assert tiers.match(hot).host == []
    tiers.promotion_failed(promotion)
    assert tiers.match(hot).host == list(copy.slots)
    assert (tiers.counters.promoted, tiers.counters.copies_failed) == (0, 2)


def test_a_promoted_block_is_used_once_it_is_asked_for_and_wasted_if_it_leaves_before() -> None:
    tiers = make_tiers(4, replace(EVERYTHING, promotion=True))
    hot, cold = hashes_of((1, 2)), hashes_of((2, 2, 2))
    tiers.cached(hot, 0, [0, 1])
    copy = tiers.worth_copying(hot)
    assert copy is not None
    tiers.copied_out(copy)
    for block in (1, 0):
        tiers.left_device(block)
    tiers.cached(cold, 0, [2, 3, 4])
    tiers.accessed(hot)
    promotion = tiers.promotion()
    assert promotion is not None
    tiers.cached(promotion.hashes, promotion.first, [5, 6])
    tiers.promoted(promotion, promotion.hashes[promotion.first :])
    assert (tiers.counters.promoted, tiers.counters.promotions_used, tiers.counters.promotions_wasted) == (2, 0, 0)
    tiers.accessed(hot[:1])
    for _ in range(2):
        tiers.accessed(hot[:1])
        tiers.left_device(6)
    assert (tiers.counters.promotions_used, tiers.counters.promotions_wasted) == (1, 1)


def test_promotions_in_vain_make_the_next_ones_rarer_and_used_ones_bring_them_back() -> None:
    tiers = make_tiers(4, replace(EVERYTHING, promotion=True, promotion_pause=4))

    def looked_for() -> list[int]:
        """Of the next 20 prefills, after which a promotion was looked for."""
        found: list[int] = []
        for prefill in range(20):
            # A search that finds nothing is visible nowhere else.
            with mock.patch.object(Promotions, "_find", return_value=None) as find:
                assert tiers.promotion() is None
            found += [prefill] * find.call_count
        return found

    assert looked_for() == [0, 2, 5, 10, 15]
    tiers.counters.promotions_used += 1
    assert looked_for() == [0, 2, 5, 10, 15]
    tiers.counters.promotions_used += 1
    tiers.counters.promotions_wasted += 2
    assert looked_for()[0] > 0


def test_a_copy_that_ends_after_a_reset_is_not_found() -> None:
    tiers = make_tiers(4, EVERYTHING)
    hashes = hashes_of((1, 2))
    tiers.cached(hashes, 0, range(2))
    copy = tiers.worth_copying(hashes)
    assert copy is not None
    tiers.reset()
    tiers.copied_out(copy)
    assert tiers.match(hashes).host == []
    assert tiers.slots.free == 4


def serve(tiers: PrefixTiers, tenant: TenantShare, blocks: range, *prompts: tuple[int, ...], answer: int = 0) -> None:
    """One after the other; what is new lies in the next of these blocks. A prompt that is computed at once is counted
    when it is cached. answer: so many blocks at the end of the last are generated."""
    free = iter(blocks)
    for prompt in prompts:
        hashes = hashes_of(prompt)
        asked = len(hashes) - (answer if prompt is prompts[-1] else 0)
        tiers.comes(hashes[:asked])
        first = len(tiers.match(hashes).device)
        tiers.cached(hashes, first, [next(free) for _ in hashes[first:]], tenant)
        tiers.accessed(hashes[:asked], tenant=tenant)
        if asked < len(hashes):
            tiers.accessed(hashes[asked:], asked, tenant, behind=hashes[asked - 1])


def test_the_newest_turn_of_a_conversation_is_a_share_and_what_comes_once_behind_a_common_beginning_is_none() -> None:
    """The other tenant has most, and has asked for all of it again."""
    flood = (3, 3, 3, 3, 3)
    for prompts, leaves in {
        ((1,), (1, 2)): 104,
        ((1,), (1, 2), (1, 2, 3)): 104,
        # Two that begin alike, a beginning that is asked for often, and one from which another went on before.
        ((1, 2), (1, 3)): 1,
        ((1,), (1,), (1, 2)): 1,
        ((1,), (1, 2), (1, 3)): 2,
    }.items():
        tiers = make_tiers(0, EVERYTHING)
        serve(tiers, CHATTING, range(10), *prompts)
        serve(tiers, FLOODING, range(100, 110), flood, flood)
        assert tiers.coldest_device_block() == leaves, prompts
        tiers.check_invariants()


def test_the_answer_to_the_newest_turn_is_part_of_it() -> None:
    flood = (3, 3, 3, 3, 3)
    for first, leaves in (((1,), 104), ((3,), 3)):
        tiers = make_tiers(0, EVERYTHING)
        serve(tiers, CHATTING, range(10), first, (1, 2, 3), answer=1)
        serve(tiers, FLOODING, range(100, 110), flood, flood)
        assert tiers.coldest_device_block() == leaves
        tiers.check_invariants()


def test_a_prompt_that_comes_and_is_given_up_leaves_nothing_behind() -> None:
    # The real bound wants 131,072 blocks.
    with mock.patch.object(prefix_tiers, "MOST_AWAITED", 4):
        tiers = make_tiers(0, EVERYTHING)
        serve(tiers, CHATTING, range(10), (1,))
        for symbols in ((1, 1, 1), (1, 2, 1), (1, 3, 1)):
            tiers.comes(hashes_of(symbols))
            tiers.check_invariants()
