"""The prefix index by scenario: which prefix a worker is said to hold, also by a prediction, and how long."""

from typing import Any

import numpy as np

from kv_transfer.claims.claims import ClaimChange
from tests.pure.control_plane.prefix_index.small_index import WORKERS, device, index, keys, matched


def test_a_match_ends_where_the_first_chunk_is_missing() -> None:
    found = index()
    found.apply("a", device(1, 2, 4))
    found.apply("b", ClaimChange(device_stored=keys(1), host_stored=keys(2, 3)))
    found.apply("c", ClaimChange(host_stored=keys(1, 2, 3, 4)))
    found.apply("a", ClaimChange(device_removed=keys(3)))
    prompt = keys(1, 2, 3, 4)

    assert matched(found, "a", prompt) == (2, 2, 2), "the fourth cannot be reached without the third"
    assert matched(found, "b", prompt) == (1, 1, 3)
    assert matched(found, "c", prompt) == (0, 0, 4)


def test_a_chunk_that_had_to_give_way_is_where_the_next_one_is() -> None:
    found = index()
    found.apply("a", device(1, 2, 4))
    assert matched(found, "a", keys(1, 2, 3, 4)) == (4, 4, 4), "nobody has said that the third has left"
    found.apply("b", device(3))
    assert matched(found, "a", keys(1, 2, 3, 4)) == (2, 2, 2), "it is known, and with b alone"


def test_what_was_dropped_and_asked_for_again_is_not_taken_for_gone() -> None:
    """The workers have told nothing of it since."""
    found = index()
    found.accessed(keys(1, 2, 3), 0.0)
    assert matched(found, "a", keys(1, 2, 3)) == (0, 0, 0)
    found.apply("a", device(3))
    assert matched(found, "a", keys(1, 2, 3)) == (3, 3, 3)
    found.apply("a", ClaimChange(device_removed=keys(2)))
    assert matched(found, "a", keys(1, 2, 3)) == (0, 0, 0), (
        "now it is known, and held by nobody; so is what is before it"
    )


def test_a_worker_that_leaves_or_comes_back_holds_nothing() -> None:
    found = index()
    for worker in WORKERS:
        found.apply(worker, device(1, 2))
    found.leave("a")
    found.join("b", 2)
    assert found.slot("a", 1) == -1 and found.slot("b", 1) == -1
    assert matched(found, "b", keys(1, 2)) == (0, 0, 0)
    assert matched(found, "c", keys(1, 2)) == (2, 2, 2)
    found.join("d", 1)
    assert matched(found, "d", keys(1, 2)) == (0, 0, 0), "it has the place of another, and none of its claims"
    found.apply("a", device(1))
    found.check_invariants()


def test_a_thousand_workers() -> None:
    names = tuple(f"w{number}" for number in range(1000))
    found = index(workers=names)
    for number, name in enumerate(names):
        found.apply(name, device(*range(1, 2 + number % 7)))
    matches = found.lookup(keys(*range(1, 8)))
    lengths = [int(matches.device[found.slot(name, found.generation(name))]) for name in names]
    assert lengths == [1 + number % 7 for number in range(1000)]


def test_a_prediction_is_believed_until_it_ends() -> None:
    found = index()
    found.predict("a", keys(1, 2), 10.0)
    assert matched(found, "a", keys(1, 2)) == (0, 2, 2)
    found.expire(9.9)
    assert matched(found, "a", keys(1, 2)) == (0, 2, 2)
    found.expire(10.0)
    assert matched(found, "a", keys(1, 2)) == (0, 0, 0)


def test_a_later_prediction_of_the_same_prefix_outlives_an_earlier_one() -> None:
    found = index()
    found.predict("a", keys(1, 2, 3), 10.0)
    found.predict("a", keys(1, 2), 20.0)
    found.expire(15.0)
    assert matched(found, "a", keys(1, 2, 3)) == (0, 2, 2)
    found.expire(25.0)
    assert matched(found, "a", keys(1, 2, 3)) == (0, 0, 0)


def test_predictions_end_with_their_worker() -> None:
    found = index()
    found.predict("a", keys(1), 10.0)
    found.leave("a")
    found.join("d", 1)
    found.expire(11.0)
    assert matched(found, "d", keys(1)) == (0, 0, 0)
    found.check_invariants()


def test_holders_of_ever_other_chunks_do_not_fill_memory() -> None:
    """Sets that nothing refers to any more are forgotten."""
    names = tuple(f"w{number}" for number in range(16))
    found = index(entries=4096, workers=names)
    rng = np.random.default_rng(4)
    for _ in range(1000):
        for name in rng.choice(names, 3, replace=False).tolist():
            chunk = keys(int(rng.integers(1, 200)))
            stored = bool(rng.integers(2))
            found.apply(name, ClaimChange(device_stored=chunk) if stored else ClaimChange(device_removed=chunk))
    state: Any = found
    # The number of sets is visible nowhere else.
    assert len(state._sets) < 1500
    found.check_invariants()
