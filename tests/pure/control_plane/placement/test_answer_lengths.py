"""How long answers are planned for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.placement.answer_lengths import AnswerLengths


def known(most_tokens: int, tokens: int, answers: int = 50) -> AnswerLengths:
    lengths = AnswerLengths()
    for _ in range(answers):
        lengths.ended(most_tokens, tokens)
    return lengths


def test_until_some_have_ended_answers_are_planned_for_as_long_as_most_become() -> None:
    assert known(4096, 40, answers=31).left(4096) == 1024
    assert known(4096, 40, answers=32).left(4096) == 80
    assert AnswerLengths().left(100) == 100, "it becomes no longer"


def test_each_size_of_bounds_is_learned_by_itself() -> None:
    lengths = known(4096, 40)
    assert (lengths.left(5000), lengths.left(100), lengths.left(1 << 20)) == (98, 100, 1024)


def test_of_other_bounds_what_answers_have_become_is_known() -> None:
    lengths = known(4096, 3000)
    assert (lengths.left(5000), lengths.left(100), lengths.left(1 << 20)) == (5000, 100, 6000)


def test_the_last_ones_count_most() -> None:
    lengths = known(1024, 1024, answers=1000)
    assert lengths.left(1024) == 1024
    for _ in range(1000):
        lengths.ended(1024, 16)
    assert 32 <= lengths.left(1024) < 64


def test_one_that_is_longer_than_expected_may_become_twice_as_long_within_its_bound() -> None:
    lengths = known(4096, 40)
    assert [lengths.left(4096, said) for said in (0, 30, 100, 3000, 4096)] == [80, 50, 100, 1096, 1]


def test_where_bounds_are_exact_nothing_is_learned() -> None:
    lengths = AnswerLengths(bounds_are_exact=True)
    for _ in range(50):
        lengths.ended(4096, 40)
    assert [lengths.left(4096, said) for said in (0, 30, 4096)] == [4096, 4066, 1]


@pytest.mark.parametrize("bounds_are_exact", [False, True])
@given(st.lists(st.tuples(st.integers(1, 1 << 20), st.integers(1, 1 << 20))), st.integers(1, 1 << 20), st.integers(0))
def test_what_is_planned_for_is_within_the_bound(
    bounds_are_exact: bool, ended: list[tuple[int, int]], most_tokens: int, said: int
) -> None:
    lengths = AnswerLengths(bounds_are_exact=bounds_are_exact)
    for each in ended:
        lengths.ended(*each)
    said = min(said, most_tokens)
    assert 1 <= lengths.left(most_tokens, said) <= max(1, most_tokens - said)
