"""Reports of simulated runs: tables, and the curves that pictures are drawn from."""

from dataclasses import replace

import pytest
from rich.console import Console

from cluster_sim.reports import plots, report
from cluster_sim.reports.figures import Figures, Series
from tests.fakes.sim_figures import run


def text_of(runs: list[Figures], width: int) -> list[str]:
    """Lines of each table, as printed."""
    texts = []
    for table in report.tables(runs, width):
        console = Console(width=width, highlight=False)
        with console.capture() as captured:
            console.print(table)
        texts.append(captured.get())
    return texts


def test_rows_stand_side_by_side_with_ratios_to_the_first_variant() -> None:
    found = {row.measure.name: row for row in report.rows([run("a"), run("b", 2.0)])}
    row = found["TTFT P90, ms"]
    assert row.ratios[0] is None
    assert row.ratios[1] == pytest.approx(2.0, rel=0.02)
    assert row.is_better(1) is False
    assert found["finished"].text(0) == "298"
    assert found["prefill busy, %"].text(0) == "75.0"
    assert found["within objectives, %"].text(0) == "50.0"


@pytest.mark.parametrize(("change", "better"), [(1.5, True), (0.5, False), (1.01, None)])
def test_more_goodput_is_better_and_hardly_any_difference_is_none(change: float, better: bool | None) -> None:
    first = run("a")
    other = replace(first, attained=int(first.attained * change))
    row = next(row for row in report.rows([first, other]) if row.measure.name.startswith("goodput"))
    assert row.is_better(1) is better


def test_rows_without_anything_to_show_are_left_out_and_a_first_zero_gives_no_ratio() -> None:
    first, other = run("a"), run("b")
    assert "preemptions" not in {row.measure.name for row in report.rows([first, other])}
    other.preemptions = 7
    row = next(row for row in report.rows([first, other]) if row.measure.name == "preemptions")
    assert (row.ratios, row.ratio_text(1), row.is_better(1)) == ((None, None), "", None)


def test_no_run_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one run"):
        report.rows([])


@pytest.mark.parametrize("width", [80, 120, 200])
def test_tables_keep_to_the_width_and_each_begins_with_the_first_variant(width: int) -> None:
    runs = [run(f"variant-{number}", 1 + number) for number in range(7)]
    texts = text_of(runs, width)
    assert all(len(line) <= width for text in texts for line in text.splitlines())
    assert all(text.splitlines()[0].split()[0] == "variant-0" for text in texts)
    shown = [name for text in texts for name in text.splitlines()[0].split()[1:]]
    assert shown == [f"variant-{number}" for number in range(1, 7)]
    assert (len(texts) == 1) is (width == 200)
    # Nothing was folded: each row is one line.
    assert all(len(text.splitlines()) == len(report.rows(runs)) + 1 for text in texts)


def test_names_are_no_markup_in_any_table() -> None:
    odd = [run("[red]a[/red]"), run("b|c\nd")]
    assert "[red]a[/red]" in text_of(odd, 200)[0]
    head = report.markdown(odd).splitlines()[0]
    assert head == "|  | [red]a[/red] | b\\|c d |"
    assert len({line.replace("\\|", "").count("|") for line in report.markdown(odd).splitlines()}) == 1


def test_in_flight_is_what_arrived_and_has_no_outcome() -> None:
    figures = Figures("a", {}, 1, 0.0)
    for number in range(100):
        figures.arrivals.add(number, 1)
        # The last outcomes are late enough to have windows of four seconds.
        figures.completions.add(number + 500, 1)
    assert (figures.arrivals.window_s, figures.completions.window_s) == (1.0, 4.0)
    points = plots.in_flight(figures)
    curve = dict(points)
    assert len(points) <= 64
    assert curve[16.0] == 16
    assert curve[112.0] == curve[496.0] == 100
    assert max(curve.values()) == 100
    assert points[-1][1] == 0


def test_in_flight_of_a_run_without_outcomes_stays_up() -> None:
    figures = Figures("a", {}, 1, 0.0)
    figures.arrivals.add(3.5, 2)
    assert plots.in_flight(figures) == [(1.0, 0.0), (2.0, 0.0), (3.0, 0.0), (4.0, 2.0)]


def test_a_ratio_is_of_the_same_windows_and_only_where_there_is_something() -> None:
    tokens, steps = Series(), Series()
    for at_s, size in ((0.5, 10), (0.6, 20), (2.5, 7)):
        tokens.add(at_s, size)
        steps.add(at_s, 1)
    assert plots.ratio(tokens, steps) == [(0.5, 15.0), (2.5, 7.0)]
    assert plots.ratio(Series(), steps) == [(0.5, 0.0), (2.5, 0.0)]
    assert plots.ratio(tokens, Series()) == []


def test_rates_of_long_runs_keep_their_sum() -> None:
    series = Series()
    for at_s in range(1000):
        series.add(at_s, 3)
    points = plots.rate(series)
    assert 32 < len(points) <= 64
    assert all(rate == pytest.approx(3) for _, rate in points[:-1])
    width_s = points[1][0] - points[0][0]
    assert sum(rate for _, rate in points) * width_s == pytest.approx(3000)
