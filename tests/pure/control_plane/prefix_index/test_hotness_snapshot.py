"""Snapshots of hotness: what they sum up, what they keep, and what they do with bytes that are none."""

import random

import numpy as np
import pytest

from control_plane.prefix_index.hotness_snapshot import (
    BEGINNING,
    NAME_BYTES,
    Access,
    DamagedSnapshotError,
    EntryName,
    HotnessSnapshot,
    decode_snapshot,
    encode_snapshot,
    entry_name,
    summed_up,
)
from kv_transfer.claims.prefix_chunks import Keys

HALF_LIFE_S = 100.0


def keys(*values: int) -> Keys:
    return np.array(values, dtype=np.uint64)


def counts(snapshot: HotnessSnapshot) -> dict[int, float]:
    return dict(zip(snapshot.keys.tolist(), np.exp2(snapshot.counts).tolist(), strict=True))


def test_counts_decay_until_the_last_entry() -> None:
    accesses = [Access(keys(1, 2), 0.0), Access(keys(1, 3), 100.0), Access(keys(1), 200.0)]

    snapshot = summed_up(None, accesses, EntryName(200_000, 0), HALF_LIFE_S, at_most=10)

    assert counts(snapshot) == pytest.approx({1: 1.75, 2: 0.25, 3: 0.5})


def test_a_stream_summed_up_in_parts_is_the_stream_summed_up_at_once() -> None:
    chosen = random.Random(3)
    accesses = [Access(keys(*chosen.sample(range(1, 30), 5)), float(at_s)) for at_s in range(0, 500, 10)]
    until = EntryName(490_000, 0)

    first = summed_up(None, accesses[:20], EntryName(190_000, 0), HALF_LIFE_S, at_most=100)
    both = summed_up(decode_snapshot(encode_snapshot(first)), accesses[20:], until, HALF_LIFE_S, at_most=100)

    assert counts(both) == pytest.approx(counts(summed_up(None, accesses, until, HALF_LIFE_S, at_most=100)), rel=1e-5)


def test_the_hottest_are_kept() -> None:
    accesses = [Access(keys(each), 0.0) for each in (5, 6, 6, 7, 7, 7)]

    snapshot = summed_up(None, accesses, EntryName(0, 1), HALF_LIFE_S, at_most=2)

    assert counts(snapshot) == pytest.approx({6: 2.0, 7: 3.0})


def test_nothing_summed_up_is_an_empty_snapshot() -> None:
    snapshot = summed_up(None, [], BEGINNING, HALF_LIFE_S, at_most=2)

    assert counts(decode_snapshot(encode_snapshot(snapshot))) == {}


def test_a_snapshot_travels() -> None:
    snapshot = HotnessSnapshot(EntryName(17, 4), keys(3, 2**64 - 1), np.array([-2.5, 8.0], dtype=np.float32))

    travelled = decode_snapshot(encode_snapshot(snapshot))

    assert travelled.until == (17, 4)
    assert travelled.keys.tolist() == [3, 2**64 - 1]
    assert travelled.counts.tolist() == [-2.5, 8.0]


def test_bytes_that_are_no_snapshot_are_refused() -> None:
    sound = encode_snapshot(HotnessSnapshot(EntryName(17, 4), keys(*range(50)), np.zeros(50, dtype=np.float32)))
    impossible = HotnessSnapshot(EntryName(17, 4), keys(1), np.array([np.inf], dtype=np.float32))
    for damaged in (
        b"",
        b"x",
        sound[:NAME_BYTES],
        sound[:-5],
        sound[:NAME_BYTES] + b"junk",
        encode_snapshot(impossible),
    ):
        with pytest.raises(DamagedSnapshotError):
            decode_snapshot(damaged)


def test_names_follow_each_other() -> None:
    name = entry_name(b"1700000000000-0")

    assert name.at_s == 1_700_000_000.0
    assert str(name.next()) == "1700000000000-1"
    assert name.before() < name < name.next()
    assert name.before().next() == name
    assert name.next().before() == name
