"""Each policy against a plain slow model, what the bound of LCAS does, and how much work ordering is."""

import copy
import itertools
import math
import random
from dataclasses import fields
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.ordering import measure_ordering, random_contenders
from prefill_worker.policies import POLICIES, Contender, Tenure, default_vllm, fcfs, lcas, make_policy, mcps

NOW_S = 100.0
STARVATION_S = 5.0


def contender(name: str, **given: object) -> Contender:
    values: dict[str, object] = {
        "complete": False,
        "arrival_s": 0.0,
        "last_chunk_s": 0.0,
        "waiting_since_s": math.inf,
        "computed_tokens": 0,
        "tenure": Tenure.WAITING,
        "queue_index": 0,
    }
    return Contender(name, **(values | given))  # type: ignore[arg-type]


def names(ordered: list[Contender]) -> list[str]:
    return [each.request_id for each in ordered]


@st.composite
def snapshots(draw: st.DrawFn) -> list[Contender]:
    """Few different values, so that ties are common."""
    count = draw(st.integers(0, 30))
    moment = st.integers(90, 100).map(float)
    return [
        contender(
            f"r{index}",
            complete=draw(st.booleans()),
            arrival_s=draw(moment),
            last_chunk_s=draw(moment),
            waiting_since_s=draw(st.one_of(moment, st.just(math.inf))),
            computed_tokens=draw(st.integers(0, 4)),
            tenure=draw(st.sampled_from(Tenure)),
            queue_index=index,
        )
        for index in range(count)
    ]


SLOW_KEYS = {
    "default_vllm": lambda each: (each.tenure, each.queue_index),
    "fcfs": lambda each: (not each.complete, each.arrival_s),
    "mcps": lambda each: (-each.computed_tokens, each.arrival_s),
    "lcas": lambda each: (
        (0, each.waiting_since_s, 0.0)
        if NOW_S - each.waiting_since_s >= STARVATION_S
        else (1, not each.complete, -each.last_chunk_s)
    ),
}


@pytest.mark.parametrize("name", POLICIES)
@given(given_contenders=snapshots())
def test_order_is_that_of_a_plain_sort_by_tuples_and_the_snapshot_is_untouched(
    name: str, given_contenders: list[Contender]
) -> None:
    before = [copy.copy(each) for each in given_contenders]
    ordered = make_policy(name, STARVATION_S)(given_contenders, NOW_S)
    assert names(ordered) == names(sorted(given_contenders, key=SLOW_KEYS[name]))
    for each, was in zip(given_contenders, before, strict=True):
        assert all(getattr(each, part.name) == getattr(was, part.name) for part in fields(Contender))


def test_default_vllm_takes_running_then_preempted_then_waiting_in_queue_order() -> None:
    given_contenders = [
        Read(
            each.request_id,
            each.complete,
            Compared(each.arrival_s),
            Compared(each.last_chunk_s),
            Compared(each.waiting_since_s),
            Compared(each.computed_tokens),  # type: ignore[arg-type]  # they are sorted as numbers
            each.tenure,
            Compared(each.queue_index),  # type: ignore[arg-type]
        )
        for each in random_contenders(random.Random(0), 500)
    ]
    make_policy(name, STARVATION_S)(given_contenders, NOW_S)
    # Twice: which list it belongs to, and the number by which that is sorted. LCAS has three lists.
    assert Read.times <= 3 * 500
    assert 0 < Compared.times <= sorts * 500 * math.log2(500) + 500


def test_the_bench_times_each_call_by_itself() -> None:
    seconds = itertools.count()
    contenders = random_contenders(random.Random(0), 10)
    found = measure_ordering(fcfs, [contenders], 5, lambda: float(next(seconds)))
    assert (found.p50_us, found.p99_us, found.runs) == (1e6, 1e6, 5)
    assert next(seconds) == 10, "the warm-up is not timed"
