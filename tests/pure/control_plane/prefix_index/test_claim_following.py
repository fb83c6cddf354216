"""What a router makes of one worker's batches and snapshots, in whatever order and state they reach it."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.prefix_index.claim_following import (
    GRACE_S,
    MOST_HELD,
    OVERRULED_S,
    Apply,
    FeedCounts,
    Instruction,
    Mode,
    Replace,
    Restart,
    SilenceWatch,
    WorkerFeed,
    slices,
)
from kv_transfer.claims.claims import ClaimBatch, ClaimChange, ClaimSnapshot
from kv_transfer.claims.prefix_chunks import Keys
from tests.examples import examples


def keys(*values: int) -> Keys:
    return np.array(values, dtype=np.uint64)


def batch(sequence: int, generation: int = 7) -> ClaimBatch:
    return ClaimBatch(generation, sequence, ClaimChange(device_stored=keys(sequence)))


def snapshot(sequence: int, generation: int = 7) -> ClaimSnapshot:
    return ClaimSnapshot(generation, sequence, keys(*range(1, sequence + 1)), keys())


class Followed:
    """A feed, and the claims that its instructions make."""

    def __init__(self, feed: type[WorkerFeed] = WorkerFeed) -> None:
        self.counts = FeedCounts()
        self.feed = feed(self.counts)
        self.claims: set[int] = set()
        self.carry_out(self.feed.registered(7, 0, 0.0))

    def mode(self) -> Mode:
        return self.feed.mode

    def carry_out(self, instructions: list[Instruction]) -> list[Instruction]:
        for instruction in instructions:
            match instruction:
                case Restart():
                    self.claims.clear()
                case Apply(change):
                    self.claims.update(change.device_stored.tolist())
                    self.claims.difference_update(change.device_removed.tolist())
                case Replace(snapshot):
                    self.claims = set(snapshot.device.tolist())
        self.feed.check_invariants()
        return instructions

    def hear(self, *batches: ClaimBatch) -> None:
        for each in batches:
            self.carry_out(self.feed.batch(each))


@pytest.fixture
def followed() -> Followed:
    return Followed()


def test_batches_in_order_apply(followed: Followed) -> None:
    followed.hear(batch(1), batch(2), batch(3))

    assert followed.claims == {1, 2, 3}
    assert followed.feed.in_sync
    assert (followed.counts.batches, followed.counts.keys) == (3, 3)


def test_a_batch_heard_twice_applies_once(followed: Followed) -> None:
    followed.hear(batch(1), batch(2), batch(1), batch(2))

    assert followed.counts.batches == 2
    assert followed.counts.duplicates == 2
    assert followed.feed.in_sync


def test_a_batch_that_comes_too_early_waits_for_the_ones_before(followed: Followed) -> None:
    followed.hear(batch(1), batch(4), batch(3))
    assert followed.claims == {1}
    assert followed.mode() is Mode.LOST

    followed.hear(batch(2))

    assert followed.claims == {1, 2, 3, 4}
    assert followed.feed.in_sync
    assert (followed.counts.held, followed.counts.gaps) == (2, 1)


def test_any_order_with_repetitions_ends_in_the_same_claims(followed: Followed) -> None:
    batches = [batch(sequence) for sequence in range(1, 40)] * 2
    random.Random(5).shuffle(batches)

    followed.hear(*batches)

    assert followed.claims == set(range(1, 40))
    assert followed.feed.in_sync


def test_what_is_held_is_bounded_and_the_rest_is_read_again(followed: Followed) -> None:
    too_early = [batch(sequence) for sequence in range(2, MOST_HELD + 10)]
    followed.hear(*too_early)
    assert followed.counts.held == len(too_early)

    followed.hear(batch(1))
    assert not followed.feed.in_sync
    followed.hear(*too_early)

    assert followed.claims == set(range(1, MOST_HELD + 10))
    assert followed.feed.in_sync


def test_a_newer_generation_voids_what_the_older_one_claimed(followed: Followed) -> None:
    followed.hear(batch(1), batch(2), batch(1, generation=8))

    assert followed.claims == {1}
    assert (followed.feed.generation, followed.feed.sequence) == (8, 1)
    assert followed.feed.in_sync


def test_a_newer_generation_of_which_batches_are_missing_needs_its_snapshot(followed: Followed) -> None:
    followed.hear(batch(1), batch(3, generation=8))
    assert followed.claims == set()
    assert followed.mode() is Mode.LOST

    followed.carry_out(followed.feed.snapshot(snapshot(2, generation=8)))

    assert followed.claims == {1, 2, 3}
    assert followed.feed.in_sync


def test_an_older_generation_says_nothing(followed: Followed) -> None:
    """Two workers that claim one id: the one that started later counts, in the stream and in the registry."""
    followed.hear(batch(1, generation=8), batch(2, generation=7))
    followed.carry_out(followed.feed.registered(7, 50, 0.0))
    followed.carry_out(followed.feed.registered(7, 50, OVERRULED_S - 0.1))
    followed.carry_out(followed.feed.snapshot(snapshot(50, generation=7)))
    followed.carry_out(followed.feed.damaged(7, 60))

    assert followed.claims == {1}
    assert followed.feed.generation == 8
    assert followed.feed.in_sync
    assert followed.feed.lag(7, 50) == 0


def test_a_registry_that_stays_with_an_older_generation_is_believed(followed: Followed) -> None:
    """Redis has lost its data, and its clock is behind."""
    followed.hear(batch(1, generation=8))
    for now_s in (0.0, OVERRULED_S):
        followed.carry_out(followed.feed.registered(7, 0, now_s))
    followed.hear(batch(1), batch(2))

    assert (followed.feed.generation, followed.claims) == (7, {1, 2})


def test_a_registry_that_is_late_now_and_then_is_not_believed(followed: Followed) -> None:
    followed.hear(batch(1, generation=8))
    for now_s in (0.0, 100.0):
        followed.carry_out(followed.feed.registered(7, 0, now_s))
        followed.carry_out(followed.feed.registered(8, 1, now_s + 1.0))

    assert (followed.feed.generation, followed.claims) == (8, {1})


def test_a_snapshot_repairs_a_gap_and_what_was_held_follows(followed: Followed) -> None:
    followed.hear(batch(1), batch(5), batch(6))

    followed.carry_out(followed.feed.snapshot(snapshot(4)))

    assert followed.claims == {1, 2, 3, 4, 5, 6}
    assert followed.feed.in_sync
    assert followed.counts.resyncs == 1


def test_a_snapshot_that_is_older_than_the_view_is_refused(followed: Followed) -> None:
    followed.hear(batch(1), batch(2), batch(3), batch(5))

    followed.carry_out(followed.feed.snapshot(snapshot(2)))

    assert followed.claims == {1, 2, 3}
    assert followed.mode() is Mode.REQUESTED


def test_without_a_snapshot_the_worker_is_asked_for_one(followed: Followed) -> None:
    followed.hear(batch(2))
    followed.carry_out(followed.feed.snapshot(None))
    assert followed.mode() is Mode.REQUESTED

    followed.feed.answered(0.0)
    assert followed.mode() is Mode.LOST
    followed.carry_out(followed.feed.snapshot(snapshot(2)))

    assert followed.claims == {1, 2}
    assert followed.feed.in_sync


def test_a_request_that_could_not_be_written_is_not_made_again_before_its_time() -> None:
    followed = Followed()
    followed.hear(batch(1), batch(3))
    followed.carry_out(followed.feed.snapshot(None))
    followed.feed.refused(15.0)
    followed.feed.answered(14.9)
    assert followed.mode() is Mode.REQUESTED
    followed.feed.answered(15.0)
    assert followed.mode() is Mode.LOST


def test_a_snapshot_that_does_not_reach_the_stream_is_taken_once_and_then_another_is_asked_for(
    followed: Followed,
) -> None:
    followed.hear(batch(9))
    followed.carry_out(followed.feed.snapshot(snapshot(4)))
    assert followed.mode() is Mode.FOLLOWING
    assert not followed.feed.in_sync

    followed.hear(batch(9))
    followed.carry_out(followed.feed.snapshot(snapshot(4)))

    assert followed.mode() is Mode.REQUESTED


def test_a_damaged_batch_is_a_missing_one(followed: Followed) -> None:
    followed.hear(batch(1))
    followed.carry_out(followed.feed.damaged(7, 2))
    assert followed.mode() is Mode.LOST
    assert followed.feed.lag(7, 0) == 1

    followed.carry_out(followed.feed.snapshot(snapshot(2)))

    assert followed.feed.in_sync
    assert followed.counts.damaged == 1


def test_a_registration_ahead_of_the_stream_is_a_gap_after_a_while(followed: Followed) -> None:
    followed.hear(batch(1))
    followed.carry_out(followed.feed.registered(7, 3, 10.0))
    followed.carry_out(followed.feed.registered(7, 3, 10.0 + GRACE_S / 2))
    assert followed.mode() is Mode.FOLLOWING
    assert followed.feed.lag(7, 3) == 2

    followed.carry_out(followed.feed.registered(7, 3, 10.0 + GRACE_S))

    assert followed.mode() is Mode.LOST
    assert followed.counts.gaps == 1


def test_a_registration_ahead_of_a_stream_that_goes_on_is_no_gap(followed: Followed) -> None:
    for sequence in range(1, 20):
        followed.carry_out(followed.feed.registered(7, sequence + 1, float(sequence)))
        followed.hear(batch(sequence))

    assert followed.counts.gaps == 0


def test_a_worker_that_has_told_much_is_joined_by_its_snapshot() -> None:
    feed = WorkerFeed(FeedCounts())

    assert feed.registered(7, 100, 0.0) == [Restart(7)]

    assert feed.mode is Mode.LOST
    assert not feed.in_sync
    assert feed.lag(7, 100) == 100


def heard_in_disorder(feed: type[WorkerFeed], chosen: random.Random) -> None:
    """Three generations tell their claims; what of it arrives, how often and when is left to chance."""
    followed = Followed(feed)
    told: list[ClaimBatch | ClaimSnapshot] = []
    for generation in (7, 8, 9):
        claims: set[int] = set()
        for sequence in range(1, chosen.randint(2, 12)):
            toggled = set(chosen.sample(range(8), 3))
            change = ClaimChange(keys(*toggled - claims), keys(*toggled & claims))
            claims ^= toggled
            told.append(ClaimBatch(generation, sequence, change))
            if not chosen.randrange(4):
                told.append(ClaimSnapshot(generation, sequence, keys(*claims), keys()))
        arriving = [each for each in told for _ in range(chosen.randrange(3))]
        chosen.shuffle(arriving)
        for each in arriving:
            feed_it = followed.feed.batch if isinstance(each, ClaimBatch) else followed.feed.snapshot
            followed.carry_out(feed_it(each))  # type: ignore[arg-type]
    last = max(each.sequence for each in told if each.generation == 9)
    followed.carry_out(followed.feed.registered(9, last, 0.0))
    followed.carry_out(followed.feed.registered(9, last, GRACE_S))
    if not followed.feed.in_sync:
        followed.carry_out(followed.feed.snapshot(ClaimSnapshot(9, last, keys(*claims), keys())))

    assert followed.feed.in_sync
    assert followed.claims == claims


@examples(300, few=15)
@given(st.randoms(use_true_random=False))
def test_whatever_arrives_of_several_generations_ends_in_the_claims_of_the_last(chosen: random.Random) -> None:
    heard_in_disorder(WorkerFeed, chosen)


class _GenerationIgnored(WorkerFeed):
    def batch(self, batch: ClaimBatch) -> list[Instruction]:
        return super().batch(ClaimBatch(max(self.generation, batch.generation), batch.sequence, batch.change))


class _DuplicatesApplied(WorkerFeed):
    def batch(self, batch: ClaimBatch) -> list[Instruction]:
        instructions = super().batch(batch)
        return instructions or [Apply(batch.change)]


class _HeldIsNeverDropped(WorkerFeed):
    def _restart_if_newer(self, generation: int) -> list[Instruction]:
        held = dict(self._held)
        restart = super()._restart_if_newer(generation)
        self._held.update({sequence: change for sequence, change in held.items() if sequence > self.sequence + 1})
        return restart


@pytest.mark.parametrize("bug", [_GenerationIgnored, _DuplicatesApplied, _HeldIsNeverDropped])
def test_a_planted_bug_is_noticed(bug: type[WorkerFeed]) -> None:
    with pytest.raises(AssertionError):
        for seed in range(500):
            heard_in_disorder(bug, random.Random(seed))


def test_silence_is_requests_without_blocks_for_a_while() -> None:
    watch = SilenceWatch(silent_after_s=60.0)
    watch.observe(10, 10, now_s=0.0)
    watch.observe(11, 11, now_s=1.0)
    for requests, now_s in ((12, 1000.0), (13, 1001.0), (14, 1002.0)):
        watch.observe(requests, 11, now_s)
        assert not watch.is_silent(now_s)

    assert not watch.is_silent(1059.9)
    assert watch.is_silent(1060.0)

    watch.observe(15, 12, now_s=1061.0)
    assert not watch.is_silent(5000.0)


def test_few_requests_without_blocks_are_no_silence() -> None:
    watch = SilenceWatch(silent_after_s=60.0)
    watch.observe(1, 1, now_s=0.0)
    watch.observe(3, 1, now_s=1.0)

    assert not watch.is_silent(10_000.0)


def test_a_restarted_worker_is_not_silent() -> None:
    watch = SilenceWatch(silent_after_s=60.0)
    watch.observe(100, 50, now_s=0.0)
    watch.observe(110, 50, now_s=1.0)
    watch.observe(0, 0, now_s=2.0)

    assert not watch.is_silent(10_000.0)


def test_slices_are_together_the_change() -> None:
    change = ClaimChange(keys(*range(1, 8)), keys(20, 21), keys(*range(30, 35)), keys())

    parts = list(slices(change, 3))

    assert max(map(len, parts)) == 3
    for name in ("device_stored", "device_removed", "host_stored", "host_removed"):
        assert np.concatenate([getattr(part, name) for part in parts]).tolist() == getattr(change, name).tolist()
    assert list(slices(change, 100)) == [change]
