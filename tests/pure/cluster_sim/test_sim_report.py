"""Reports of simulated runs: tables, pictures, the page."""

import random
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from cluster_sim.reports import html_report, plots, report
from cluster_sim.reports.figures import Figures, Histogram, Series

SCENARIO = "name: <script>alert(1)</script>\nvariants: {a: &x 1, b: 2}\n"


def run(name: str, ttft_scale: float = 1.0, *, seed: int = 0, requests: int = 300) -> Figures:
    rng = random.Random(seed)
    figures = Figures(name, {"prefill": 2, "decode": 1}, 3, 2.5, slo_ttft_s=0.5, slo_tpot_s=0.05)
    figures.outcomes = {"finished": requests - 2, "refused": 2}
    figures.duration_s = 100.0
    figures.busy_s = {"prefill": 150.0, "decode": 50.0}
    figures.imbalance = {"prefill": 1.25, "decode": 1.0}
    figures.prompt_tokens, figures.device_hit_tokens, figures.host_hit_tokens = 1000 * requests, 400 * requests, 0
    figures.measured, figures.attained = requests, requests // 2
    for number in range(requests):
        at_s = number / 3
        ttft_s = ttft_scale * rng.lognormvariate(-1, 1)
        figures.arrivals.add(at_s, 1)
        figures.completions.add(at_s + ttft_s + 2, 1)
        figures.throughput.add(at_s + ttft_s, 50)
        figures.steps.add(at_s + ttft_s, 5)
        figures.prompts.add(at_s, 1000)
        figures.hits.add(at_s, 400)
        figures.generated_tokens += 50
        figures.ttft_s.add(ttft_s)
        figures.tpot_s.add(rng.uniform(0.01, 0.03))
    return figures


@pytest.fixture
def few_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes long, and all lines over time are drawn alike."""
    kept = ("ttft", "in_flight", "hit_ratio")
    monkeypatch.setattr(plots, "PANELS", {name: plots.PANELS[name] for name in kept})


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


@pytest.mark.usefixtures("few_panels")
def test_an_empty_run_is_told_without_dividing_by_zero() -> None:
    empty = Figures("empty", {"prefill": 1}, 1, 0.0)
    assert [row.text(0) for row in report.rows([empty])][:2] == ["1", "0"]
    assert "empty" in html_report.page("t", "", [empty, run("b")])


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


def _runs() -> list[Figures]:
    return [run("a"), run("_b $x$ <i>&", 2.0, seed=1)]


@pytest.mark.usefixtures("few_panels")
def test_the_page_is_the_same_for_the_same_runs_and_another_for_others() -> None:
    first = html_report.page("title", SCENARIO, _runs(), ["a note"])
    assert first == html_report.page("title", SCENARIO, _runs(), ["a note"])
    assert first != html_report.page("title", SCENARIO, [run("a"), run("_b $x$ <i>&", 2.0, seed=2)], ["a note"])


@pytest.mark.usefixtures("few_panels")
def test_the_page_stands_alone_and_escapes_what_it_is_given() -> None:
    text = html_report.page("<b>title", SCENARIO, _runs(), ["<img src=x onerror=y>"])
    assert "<script" not in text and "<img" not in text and "<b>" not in text and "<i>" not in text
    assert "&lt;script&gt;alert(1)" in text
    # Names of SVG's namespaces are the only addresses, and links lead to the page itself.
    addresses = set(re.findall(r"https?://[^\"'\s<]+", text))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert all(link.startswith("#") for link in re.findall(r"(?:href|src)=\"([^\"]*)\"", text))
    assert "@import" not in text
    assert "prefers-color-scheme: dark" in text


@pytest.mark.usefixtures("few_panels")
def test_ids_in_the_page_are_unique_and_lines_take_the_colour_of_its_text() -> None:
    text = html_report.page("title", SCENARIO, _runs())

    class Ids(HTMLParser):
        found: list[str]

        def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
            self.found += [value for name, value in attributes if name == "id" and value]

    ids = Ids()
    ids.found = []
    ids.feed(text)
    assert ids.found and len(ids.found) == len(set(ids.found))
    assert set(re.findall(r"url\(#([^)]+)\)", text)) <= set(ids.found)
    assert "currentColor" in text and "#010203" not in text


def test_a_date_in_a_picture_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(plots._NO_METADATA, ".svg", {"Date": "2026-11-22"})
    assert "2026-11-22" in plots.svg(_runs(), "ttft")
    monkeypatch.undo()
    assert not re.search(r"20\d\d-\d\d-\d\d", plots.svg(_runs(), "ttft"))


def test_the_objective_is_a_line_in_the_picture() -> None:
    assert "objective 500 ms" in plots.svg([run("a")], "ttft")
    assert "objective" not in plots.svg([replace(run("a"), slo_ttft_s=0.0)], "ttft")


@pytest.mark.usefixtures("few_panels")
@pytest.mark.parametrize("ending", ["png", "svg"])
def test_saved_pictures_have_the_same_bytes(tmp_path: Path, ending: str) -> None:
    for name in ("one", "two"):
        plots.save(_runs(), "title $", tmp_path / f"{name}.{ending}")
    assert (tmp_path / f"one.{ending}").read_bytes() == (tmp_path / f"two.{ending}").read_bytes()


def test_runs_without_any_request_can_be_drawn(tmp_path: Path) -> None:
    plots.save([Figures("empty", {}, 1, 0.0, ttft_s=Histogram())], "title", tmp_path / "empty.png")
    assert (tmp_path / "empty.png").stat().st_size > 1000
