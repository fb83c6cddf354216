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
from prefill_worker.policies import (
    POLICIES,
    Contender,
    Tenure,
    by_priority,
    default_vllm,
    fcfs,
    lcas,
    make_policy,
    mcps,
)
from tests.examples import examples

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
            left_tokens=draw(st.sampled_from([-2.0, 0.5, 2.0])),
            survival=draw(st.sampled_from([0.1, 0.5, 1.0])),
        )
        for index in range(count)
    ]


SLOW_KEYS = {
    "default": lambda each: (0, each.left_tokens, 0.0) if each.complete else (1, -each.survival, each.arrival_s),
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
@examples(100, few=5)
@given(contenders=snapshots())
def test_order_is_that_of_a_plain_sort_by_tuples_and_the_snapshot_is_untouched(
    name: str, contenders: list[Contender]
) -> None:
    before = [copy.copy(each) for each in contenders]
    ordered = make_policy(name, STARVATION_S)(contenders, NOW_S)
    assert names(ordered) == names(sorted(contenders, key=SLOW_KEYS[name]))
    for each, was in zip(contenders, before, strict=True):
        assert all(getattr(each, part.name) == getattr(was, part.name) for part in fields(Contender))


def test_default_vllm_takes_running_then_preempted_then_waiting_in_queue_order() -> None:
    contenders = [
        contender("waiting-0", tenure=Tenure.WAITING, queue_index=0, arrival_s=1.0),
        contender("preempted-0", tenure=Tenure.PREEMPTED, queue_index=0, arrival_s=9.0),
        contender("running-1", tenure=Tenure.RUNNING, queue_index=1, arrival_s=2.0),
        contender("running-0", tenure=Tenure.RUNNING, queue_index=0, arrival_s=3.0),
    ]
    assert names(default_vllm(contenders, NOW_S)) == ["running-0", "running-1", "preempted-0", "waiting-0"]


def test_fcfs_takes_a_late_complete_request_before_an_early_partial_one() -> None:
    contenders = [contender("partial", arrival_s=1.0), contender("complete", arrival_s=2.0, complete=True)]
    assert names(fcfs(contenders, NOW_S)) == ["complete", "partial"]


def test_mcps_takes_the_most_computed_and_among_equals_the_first_to_arrive() -> None:
    contenders = [
        contender("late", arrival_s=2.0, computed_tokens=10),
        contender("early", arrival_s=1.0, computed_tokens=10),
        contender("ahead", arrival_s=3.0, computed_tokens=11),
    ]
    assert names(mcps(contenders, NOW_S)) == ["ahead", "early", "late"]


def test_lcas_takes_the_most_recent_input_first_within_complete_and_partial() -> None:
    contenders = [
        contender("old-partial", last_chunk_s=1.0),
        contender("fresh-partial", last_chunk_s=9.0),
        contender("old-complete", last_chunk_s=2.0, complete=True),
        contender("fresh-complete", last_chunk_s=3.0, complete=True),
    ]
    expected = ["fresh-complete", "old-complete", "fresh-partial", "old-partial"]
    assert names(lcas(STARVATION_S)(contenders, NOW_S)) == expected


@pytest.mark.parametrize(
    ("waited_s", "first"), [(STARVATION_S - 0.001, "fresh"), (STARVATION_S, "starved"), (60.0, "starved")]
)
def test_lcas_lets_a_partial_request_pass_all_fresh_ones_once_it_has_waited_long_enough(
    waited_s: float, first: str
) -> None:
    starved = contender("starved", last_chunk_s=1.0, waiting_since_s=NOW_S - waited_s)
    fresh = contender("fresh", last_chunk_s=NOW_S, complete=True)
    assert names(lcas(STARVATION_S)([fresh, starved], NOW_S))[0] == first


def test_lcas_serves_every_one_of_endlessly_refreshed_rivals_within_the_bound() -> None:
    """One is served each second; rivals always have fresher input than the one that waits."""
    policy, starvation_s = lcas(STARVATION_S), STARVATION_S
    quiet = contender("quiet", arrival_s=0.0, last_chunk_s=0.0, waiting_since_s=0.0)
    for second in range(60):
        now_s = float(second)
        rivals = [contender(f"rival-{second}-{index}", last_chunk_s=now_s, complete=True) for index in range(3)]
        if policy([*rivals, quiet], now_s)[0] is quiet:
            assert now_s <= starvation_s
            return
    pytest.fail("never served")


def test_lcas_never_calls_a_contender_overdue_that_is_being_served() -> None:
    served = contender("served", last_chunk_s=1.0, waiting_since_s=math.inf)
    fresh = contender("fresh", last_chunk_s=2.0)
    assert names(lcas(STARVATION_S)([served, fresh], 1e9)) == ["fresh", "served"]


class Read(Contender):
    """Counts how often its values are looked at."""

    times: ClassVar[int] = 0

    def __getattribute__(self, name: str) -> Any:
        Read.times += 1
        return super().__getattribute__(name)


class Compared(float):
    """Counts how often two are compared."""

    times: ClassVar[int] = 0

    def __lt__(self, other: float) -> bool:
        Compared.times += 1
        return super().__lt__(other)


@pytest.mark.parametrize(
    ("name", "sorts"), [("default", 1), ("default_vllm", 1), ("fcfs", 1), ("mcps", 2), ("lcas", 1)]
)
def test_ordering_500_reads_each_a_few_times_and_compares_single_numbers_as_often_as_a_sort_does(
    name: str, sorts: int
) -> None:
    """How long it takes is told by `rachis bench ordering`."""
    Read.times = Compared.times = 0
    contenders = [
        Read(
            each.request_id,
            each.complete,
            Compared(each.arrival_s),
            Compared(each.last_chunk_s),
            Compared(each.waiting_since_s),
            Compared(each.computed_tokens),  # type: ignore[arg-type]  # they are sorted as numbers
            each.tenure,
            Compared(each.queue_index),  # type: ignore[arg-type]
            left_tokens=Compared(each.left_tokens),
            survival=Compared(each.survival),
        )
        for each in random_contenders(random.Random(0), 500)
    ]
    make_policy(name, STARVATION_S)(contenders, NOW_S)
    # Twice: which list it belongs to, and the number by which that is sorted. LCAS has three lists.
    assert Read.times <= 3 * 500
    assert 0 < Compared.times <= sorts * 500 * math.log2(500) + 500


def test_what_a_long_wait_has_earned_goes_before_short_prompts_that_came_later() -> None:
    order = make_policy("default", STARVATION_S)
    long_one, short = (
        contender(name, complete=True, left_tokens=left) for name, left in (("long", 1e3), ("short", 1e2))
    )
    partial = contender("partial", complete=False, arrival_s=0.0)

    assert names(order([partial, long_one, short], NOW_S)) == ["short", "long", "partial"]
    long_one.left_tokens -= 901.0
    assert names(order([partial, long_one, short], NOW_S)) == ["long", "short", "partial"]


def test_the_bench_times_each_call_by_itself() -> None:
    seconds = itertools.count()
    contenders = random_contenders(random.Random(0), 10)
    found = measure_ordering(fcfs, [contenders], 5, lambda: float(next(seconds)))
    assert (found.p50_us, found.p99_us, found.runs) == (1e6, 1e6, 5)
    assert next(seconds) == 10, "the warm-up is not timed"


def test_what_clients_say_goes_above_the_policy_which_orders_those_of_one_priority() -> None:
    given = [
        contender(f"r{number}", arrival_s=float(number), priority=(1, 0, -1, 0)[number % 4]) for number in range(8)
    ]
    ordered = by_priority(fcfs(given, NOW_S))
    assert names(ordered) == ["r2", "r6", "r1", "r3", "r5", "r7", "r0", "r4"]
