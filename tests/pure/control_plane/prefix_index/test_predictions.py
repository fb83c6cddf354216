"""A look at the index says what it would say once ended predictions were withdrawn, and withdraws none."""

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from control_plane.prefix_index.holder_sets import UNKNOWN
from control_plane.prefix_index.index import PrefixIndex
from control_plane.prefix_index.predictions import Predictions
from kv_transfer.claims.claims import ClaimChange
from kv_transfer.claims.prefix_chunks import Keys

WORKERS = ("a", "b", "c")
CHUNKS = 12


def chain(depth: int, branch: int = 0, split: int = CHUNKS) -> Keys:
    """A prompt's chunks: two branches agree until they split and never after, as names cover all that stands before."""
    numbers = [at + 1 + (1000 * branch + 100 * split if branch and at >= split else 0) for at in range(depth)]
    return np.array([number * 0x9E3779B97F4A7C15 % 2**64 for number in numbers], dtype=np.uint64)


def matched(index: PrefixIndex, keys: Keys, now_s: float) -> list[list[int]]:
    found = index.lookup(keys, now_s)
    return [found.device.tolist(), found.warm.tolist(), found.held.tolist()]


prompts = st.builds(chain, st.integers(1, CHUNKS), st.integers(0, 2), st.integers(1, 8))
events = st.lists(
    st.one_of(
        st.tuples(st.just("predict"), st.sampled_from(WORKERS), prompts, st.integers(1, 9)),
        st.tuples(st.just("device"), st.sampled_from(WORKERS), prompts, st.booleans()),
        st.tuples(st.just("host"), st.sampled_from(WORKERS), prompts, st.booleans()),
        st.tuples(st.just("accessed"), st.none(), prompts, st.none()),
        st.tuples(st.just("expire"), st.none(), st.none(), st.integers(0, 9)),
        st.tuples(st.just("leave"), st.sampled_from(WORKERS), st.none(), st.none()),
    ),
    max_size=15,
)


def played(steps: list[Any], entries: int) -> PrefixIndex:
    index = PrefixIndex(entries, 100.0)
    for worker in WORKERS:
        index.join(worker, 1)
    for kind, worker, keys, value in steps:
        match kind:
            case "predict":
                index.predict(worker, keys, float(value))
            case "accessed":
                index.accessed(keys, 1.0)
            case "expire":
                index.expire(float(value))
            case "leave":
                index.leave(worker)
                index.join(worker, 2)
            case tier:
                index.apply(worker, ClaimChange(**{f"{tier}_{'stored' if value else 'removed'}": keys}))
    return index


@given(events, prompts, st.integers(0, 10), st.sampled_from([8, 1024]))
@settings(max_examples=60, deadline=None)
def test_a_lookup_sees_what_it_would_see_after_expiring(
    steps: list[Any], prompt: Keys, now_s: int, entries: int
) -> None:
    """With room for everything, and in a table where chunks have to give way."""
    index = played(steps, entries)
    # A side effect of a lookup that no public reading shows is the one to find.
    predictions, table = index._predictions, index._table
    predictions.check_invariants()
    before = len(predictions), table.sets.tolist()
    seen = matched(index, prompt, float(now_s))
    assert (len(predictions), table.sets.tolist()) == before
    index.expire(float(now_s))
    assert seen == matched(index, prompt, float("-inf"))
    assert seen == matched(index, prompt, float(now_s))


def test_what_another_prediction_goes_on_with_has_not_ended() -> None:
    predictions = Predictions()
    predictions.add(3, chain(4), 5.0)
    predictions.add(3, chain(2), 9.0)
    predictions.add(4, chain(2), 5.0)
    first = int(chain(1)[0])
    assert predictions.ended(first, 4.9) == {}
    ended = predictions.ended(first, 5.0)
    assert {slot: set(keys.tolist()) for slot, keys in ended.items()} == {
        3: set(chain(4)[2:].tolist()),
        4: set(chain(2).tolist()),
    }
    assert len(predictions) == 3
    assert {slot: len(keys) for slot, keys in predictions.expire(5.0)} == {3: 2, 4: 2}
    assert len(predictions) == 1 and predictions.ended(first, 8.0) == {}
    predictions.forget(3)
    assert len(predictions) == 0 and predictions.expire(20.0) == []


def test_a_predicted_chunk_that_gave_way_and_came_back_is_looked_at_as_it_will_be() -> None:
    """Withdrawing makes it known that nobody holds it; before, it is where the next chunk is."""
    index = PrefixIndex(1024, 100.0)
    for worker in WORKERS:
        index.join(worker, 1)
    keys = chain(3)
    index.predict("a", keys, 5.0)
    index.apply("b", ClaimChange(device_stored=keys))
    # As after the chunk gave way and came back, which depends on what else is in the table.
    table = index._table
    table.sets[table.find(keys[:1])] = UNKNOWN
    assert matched(index, keys, 4.0)[0] == [0, 3, 0]
    seen = matched(index, keys, 5.0)
    index.expire(5.0)
    assert seen == matched(index, keys, 5.0)
    assert seen[0] == [0, 0, 0]


def compared(prompts: int) -> int:
    """Chunks that are looked at while so many prompts of one system prompt end, one after the other."""
    predictions = Predictions()
    for number in range(prompts):
        predictions.add(0, chain(24, number + 1, 4), float(number))
    over = [predictions.expire(float(number))[0][1] for number in range(prompts)]
    assert [len(keys) for keys in over] == [20] * (prompts - 1) + [24]
    assert len(predictions) == 0
    return predictions.compared


def test_what_ends_costs_as_much_however_many_prompts_begin_alike() -> None:
    few, many = compared(100), compared(1000)
    assert many <= 11 * few
    assert many <= 1000 * 2 * 24


@given(st.lists(st.tuples(prompts, st.integers(1, 9)), max_size=12), st.integers(0, 10))
def test_what_is_over_is_what_no_other_prompt_has(added: list[tuple[Keys, int]], now_s: int) -> None:
    predictions = Predictions()
    for keys, until_s in added:
        predictions.add(0, keys, float(until_s))
    ended = {chunk for keys, until_s in added if until_s <= now_s for chunk in keys.tolist()}
    goes_on = {chunk for keys, until_s in added if until_s > now_s for chunk in keys.tolist()}
    families = {int(keys[0]) for keys, _ in added}
    seen = [keys.tolist() for first in families for keys in predictions.ended(first, float(now_s)).values()]
    found = [chunk for _, keys in predictions.expire(float(now_s)) for chunk in keys.tolist()]
    assert sorted(found) == sorted(ended - goes_on) == sorted(chunk for keys in seen for chunk in keys)
    predictions.check_invariants()
