"""What a router has on a worker: whatever comes and goes in whatever order, nothing is left of it in the end."""

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster_core.tenant_shares import Claimant
from control_plane.fleet.loads import Load, Loads, Work

SECONDS = st.sampled_from([0.0, 0.1, 1 / 3, 7.7])
WORKS = st.builds(
    Work,
    st.integers(1, 99),
    st.integers(0, 99),
    SECONDS,
    st.booleans(),
    st.integers(0, 9),
    st.booleans(),
    st.booleans(),
)
# A new request, or (which of those there are, whether it is prefilled or ends).
MOVES = st.lists(st.one_of(WORKS, st.tuples(st.integers(0, 99), st.booleans())), max_size=40)


@given(MOVES)
@settings(max_examples=200)
def test_all_that_comes_is_counted_by_class_and_leaves_nothing(moves: list[Work | tuple[int, bool]]) -> None:
    loads, there = Loads(), list[Work]()
    row = loads.take_row()
    for now_s, move in enumerate(moves):
        if isinstance(move, Work):
            loads.begin(row, move, now_s)
            there.append(move)
        elif there:
            work = there.pop(move[0] % len(there))
            if move[1] and work.expected_s:
                loads.prefilled(row, work, now_s)
                there.append(work.prefilled)
            else:
                loads.end(row, work, now_s)
        waits = [work for work in there if work.best_effort and work.expected_s]
        assert round(loads.value(row, Load.OVERTAKEN)) == len(waits)
        assert round(loads.value(row, Load.OVERTAKEN_TOKENS)) == sum(work.tokens for work in waits)
        ahead_s = sum(work.pending_s for work in there if not work.best_effort)
        assert abs(loads.value(row, Load.AHEAD_S) - ahead_s) < 1e-9
        assert (loads.value(row, Load.AHEAD_S) == 0) == (ahead_s == 0), "a residue would make a worker late"
    for work in there:
        loads.end(row, work, len(moves))
    left = {each.name: loads.value(row, each) for each in Load if each not in PASSING}
    assert {name for name, value in left.items() if abs(value) > 1e-9} == set()


# Points in time, and the number of the last placement.
PASSING = {Load.PROGRESS_S, Load.AHEAD_PROGRESS_S, Load.TURN}


def test_a_prompt_that_comes_no_more_is_expected_no_more_though_others_still_come() -> None:
    loads = Loads()
    row = loads.take_row()
    session = Work(16, 16, 0.5, arriving=True)
    cancelled = Work(2000, 2000, 2.0, arriving=True)
    loads.begin(row, session, 10.0)
    for number in range(100):
        loads.begin(row, cancelled, 10.0 + number / 1000)
        loads.end(row, cancelled, 10.0 + number / 1000)
    assert abs(loads.value(row, Load.ARRIVING_UNTIL_S) - 10.5) < 1e-9
    loads.begin(row, cancelled, 20.0)
    loads.end(row, session, 21.0)
    assert 21.0 <= loads.value(row, Load.ARRIVING_UNTIL_S) <= 22.0
    loads.end(row, cancelled, 21.0)
    assert loads.value(row, Load.ARRIVING_UNTIL_S) == 0.0


def test_what_takes_for_ever_leaves_nothing_behind() -> None:
    loads = Loads()
    row = loads.take_row()
    for_ever, usual = Work(10, 10, math.inf, whose=Claimant()), Work(10, 10, 2.0, whose=Claimant())
    loads.begin(row, usual, 0.0)
    loads.begin(row, for_ever, 0.0)
    loads.end(row, for_ever, 1.0)
    assert np.isfinite(loads.of(np.array([row]))).all()
    loads.end(row, usual, 1.0)
    assert loads.value(row, Load.PENDING_S) == loads.value(row, Load.AHEAD_S) == 0.0
    assert not loads.lines.of(row)
