"""How long answers are planned for."""

from hypothesis import given
from hypothesis import strategies as st

from control_plane.placement.answer_lengths import AnswerLengths


def known(most_tokens: int, tokens: int, answers: int = 50) -> AnswerLengths:
    lengths = AnswerLengths()
    for _ in range(answers):
        lengths.completed(most_tokens, tokens)
    return lengths


def test_until_some_have_been_completed_all_of_the_bound_is_planned_for() -> None:
    assert known(4096, 40, answers=31).left(4096) == 4096
    assert known(4096, 40, answers=32).left(4096) == 80


def test_each_size_of_bounds_is_learned_by_itself() -> None:
    lengths = known(4096, 40)
    assert (lengths.left(5000), lengths.left(100), lengths.left(1 << 20)) == (98, 100, 1 << 20)


def test_the_last_ones_count_most() -> None:
    lengths = known(1024, 1024, answers=1000)
    assert lengths.left(1024) == 1024
    for _ in range(1000):
        lengths.completed(1024, 16)
    assert 32 <= lengths.left(1024) < 64


def test_one_that_is_longer_than_expected_may_become_twice_as_long_within_its_bound() -> None:
    lengths = known(4096, 40)
    assert [lengths.left(4096, said) for said in (0, 30, 100, 3000, 4096)] == [80, 50, 100, 1096, 1]


@given(st.lists(st.tuples(st.integers(1, 1 << 20), st.integers(0, 1 << 20))), st.integers(1, 1 << 20), st.integers(0))
def test_what_is_planned_for_is_within_the_bound(completed: list[tuple[int, int]], most_tokens: int, said: int) -> None:
    lengths = AnswerLengths()
    for each in completed:
        lengths.completed(*each)
    said = min(said, most_tokens)
    assert 1 <= lengths.left(most_tokens, said) <= max(1, most_tokens - said)
