"""How wide the columns of a table are: as their cells are, and where that is too much, without breaking words."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from command_line.output import column_widths, made_table

GAP = 2


def printed(columns: Sequence[str], *rows: Sequence[str], terminal: int = 80) -> list[str]:
    console = Console(width=terminal, color_system=None, soft_wrap=True)
    with console.capture() as captured:
        console.print(made_table("", columns, rows))
    return captured.get().splitlines()


def test_what_fits_is_as_wide_as_its_cells() -> None:
    assert column_widths([("worker", "ms"), ("[bold]decode-0[/bold]", "1.5")], 80) == [8, 3]
    assert column_widths([("a\nlonger line", "")], 80) == [11, 0]


def test_an_address_in_brackets_is_shown_as_it_is() -> None:
    lines = printed(("worker", "node"), ("prefill-0", "[fd00::10]:7421"))
    assert lines[-1].split() == ["prefill-0", "[fd00::10]:7421"]


def test_sentences_are_broken_between_words_and_others_stay_whole() -> None:
    rows = ("worker", "why"), ("prefill-0", "it holds most of this long prompt in its memory already")
    assert column_widths(rows, 40) == [9, 29]
    lines = printed(*rows, terminal=80)
    assert any("prefill-0" in line for line in lines)


def test_a_word_that_is_longer_than_all_the_room_is_broken_and_no_other() -> None:
    assert column_widths([("x" * 100, "disaggregation")], 40) == [24, 14]


@given(st.lists(st.tuples(*[st.text("ab c", max_size=30)] * 4), min_size=1, max_size=4), st.integers(20, 100))
@settings(max_examples=100)
def test_a_table_fits_its_terminal_and_breaks_no_word_that_has_room(rows: list[tuple[str, ...]], terminal: int) -> None:
    widths = column_widths(rows, terminal)
    assert sum(widths) + GAP * (len(widths) - 1) <= terminal
    longest = [max((cell_len(word) for row in rows for word in row[number].split()), default=0) for number in range(4)]
    if sum(longest) + GAP * 3 <= terminal:
        assert all(width >= word for width, word in zip(widths, longest, strict=True))
