"""How what something costs routers is compared: in turns, round by round."""

from collections import Counter
from typing import Any, cast

import pytest

from benchmarks.router_turns import Arm, Turn, compared, in_turn


def test_each_router_stands_in_each_place_equally_often() -> None:
    arms = [Arm(name, cast(Any, None), cast(Any, None)) for name in "abcd"]
    places = Counter((arm.name, place) for number in range(8) for place, arm in enumerate(in_turn(arms, number)))
    assert set(places.values()) == {2} and len(places) == 16


def test_ratios_are_of_the_same_round_so_that_a_machine_that_slows_down_is_in_none() -> None:
    off = [Turn(10.0 * slow, 100.0 * slow, 1000.0 * slow, None) for slow in (1, 2, 5)]
    on = [Turn(11.0 * slow, 100.0 * slow, 1030.0 * slow, 0.9) for slow in (1, 2, 5)]
    found = compared(off, on)
    assert found["ttft"] == {"median": 1.1, "low": 1.1, "high": 1.1}
    assert found["end_to_end"]["median"] == 1.0
    assert found["router"]["median"] == pytest.approx(1.03) and found["router_in_all"] == pytest.approx(1.03)
