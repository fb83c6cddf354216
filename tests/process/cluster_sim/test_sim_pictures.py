"""Pictures and pages of simulated runs."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from cluster_sim.reports import html_report, plots, report
from cluster_sim.reports.figures import Figures, Histogram
from tests.command import rachis
from tests.fakes.sim_figures import run
from tests.planting import planted

SCENARIO = "name: <script>alert(1)</script>\nvariants: {a: &x 1, b: 2}\n"


@pytest.fixture
def few_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes long, and all lines over time are drawn alike."""
    kept = ("ttft", "in_flight", "hit_ratio")
    # A page draws all panels, which takes most of this module's time.
    monkeypatch.setattr(plots, "PANELS", {name: plots.PANELS[name] for name in kept})


@pytest.mark.usefixtures("few_panels")
def test_an_empty_run_is_told_without_dividing_by_zero() -> None:
    empty = Figures("empty", {"prefill": 1}, 1, 0.0)
    assert [row.text(0) for row in report.rows([empty])][:2] == ["1", "0"]
    assert "empty" in html_report.page("t", "", [empty, run("b")])


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
    planted(monkeypatch, plots, "_NO_METADATA", {".svg": {"Date": "2026-11-22"}})
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


@pytest.mark.usefixtures("few_panels")
def test_the_command_writes_page_and_picture(tmp_path: Path) -> None:
    scenario, page, picture = (tmp_path / name for name in ("two.yaml", "run.html", "run.svg"))
    scenario.write_text(
        "pools: { prefill: { workers: 1 }, decode: { workers: 1 } }\n"
        "workload: { kind: prefix_groups, requests: 30, requests_per_s: 20, block_tokens: 32 }\n"
        "variants: [{ name: ours }, { name: theirs, placement: { policy: round_robin } }]\n"
    )
    done = rachis("simulate", scenario, "--html", page, "--plot", picture)
    assert done.exit_code == 0, done.output
    assert "<svg" in page.read_text() and "theirs" in page.read_text()
    assert picture.stat().st_size > 1000
