"""The site: every page has its one place in it, links hold there, pages load nothing from elsewhere, commands exist."""

import re
import shlex
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatch
from itertools import pairwise
from typing import Any

import pytest
import yaml

from cluster_configs.loading import load, parse_assignments
from cluster_core.errors import ConfigError
from control_plane.model.request_trace import TraceStage
from tests import ROOT
from tests.pure.docs.console import parse, shell_lines
from tools import pictures
from tools.doc_site import ELSEWHERE, pages, rewritten
from tools.offline_site import remote_sources, remote_styles

SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
DOCS = ROOT / "docs"
OWN = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
KEYS = {entry.key for entry in load().entries}
# Names of libraries, which decisions speak of.
_OF_LIBRARIES = {"ray.init", "redis.asyncio"}
# Keys of a simulated scenario, whose sections have names of the configuration's.
_OF_SCENARIOS = {"router.hop_ms", "router.pull_ms"}
SECTIONS = {key.partition(".")[0] for key in KEYS}
# Runbooks have a test of their own; the others draw, and tell nobody what to type.
_WITHOUT_COMMANDS = ("runbooks", "decisions", "internals", "reference")
# Those that take the settings of a service.
_SETTINGS = ("--profile", "--set", "--model")


def placed(nav: Any) -> Iterator[str]:
    """The pages that a navigation leads to."""
    if isinstance(nav, str):
        yield nav
        return
    for each in nav if isinstance(nav, list) else nav.values():
        yield from placed(each)


def left_out(page: str) -> bool:
    return any(fnmatch(f"/{page}", pattern) for pattern in SITE["not_in_nav"].split())


def settings(line: str) -> dict[str, list[str]]:
    words = shlex.split(line, comments=True)
    given: dict[str, list[str]] = {option: [] for option in _SETTINGS}
    for option, value in pairwise(words):
        if option in given:
            given[option].append(value)
    return given


def check_settings(line: str) -> None:
    """Raises ConfigError where a service would refuse what the command sets."""
    given = settings(line)
    flags = parse_assignments(given["--set"])
    flags |= {"model.path": given["--model"][-1]} if given["--model"] else {}
    load(profile=given["--profile"][-1] if given["--profile"] else None, flags=flags)


def test_every_page_has_one_place_in_the_navigation_or_is_left_out_on_purpose() -> None:
    times = Counter(placed(SITE["nav"]))
    assert [page for page, count in times.items() if count > 1] == []
    assert set(times) == {page for page in (*OWN, *ELSEWHERE) if not left_out(page)}


def test_decisions_are_reached_from_their_table() -> None:
    named = set(re.findall(r"\]\((\d{4}-[^)]+\.md)\)", (DOCS / "decisions" / "README.md").read_text()))
    assert named == {page.removeprefix("decisions/") for page in OWN if fnmatch(page, "decisions/0*.md")}


@pytest.mark.parametrize("page", [*OWN, *ELSEWHERE])
def test_every_link_of_a_page_leads_to_a_page_or_is_a_path(page: str) -> None:
    text = (ROOT / ELSEWHERE.get(page, f"docs/{page}")).read_text()
    shown = rewritten(text, page, pages())
    assert shown.count("![") == text.count("![")
    assert re.findall(r"\]\(\s*(?:\.\./)*[\w/.]+\.(?:py|proto|yaml|json|toml|txt)\)", shown) == []


@pytest.mark.parametrize(
    ("page", "text", "shown"),
    [
        ("how/index.md", "[a](../figures.md#faults)", "[a](../figures.md#faults)"),
        ("how/index.md", "[code](../../ARCHITECTURE.md)", "[code](../contribute/architecture.md)"),
        ("contribute/architecture.md", "[words](docs/glossary.md)", "[words](../glossary.md)"),
        ("using.md", "[schema.py](../cluster_configs/schema.py)", "`cluster_configs/schema.py`"),
        ("using.md", "[the schema](../cluster_configs/schema.py#L1)", "the schema (`cluster_configs/schema.py`)"),
        ("using.md", "[schema.py](\n../cluster_configs/schema.py)", "`cluster_configs/schema.py`"),
        ("how/index.md", "![x](pictures/hand-off.svg)", "![x](pictures/hand-off.svg)"),
        ("decode.md", "![x](../benchmarks/results/decode-locality-cpu.png)", "![x](pictures/decode-locality-cpu.png)"),
        ("using.md", "`[a](../no.py)` [b](https://b.org)", "`[a](../no.py)` [b](https://b.org)"),
        ("using.md", "```\n[a](../no.py)\n```\n", "```\n[a](../no.py)\n```\n"),
    ],
)
def test_links_become_those_of_the_site(page: str, text: str, shown: str) -> None:
    assert rewritten(text, page, pages()) == shown


def test_a_link_that_leads_nowhere_is_refused() -> None:
    with pytest.raises(ValueError, match=r"using\.md: a link to no/where\.py, which does not exist"):
        rewritten("[a](no/where.py)", "using.md", pages())


@pytest.mark.parametrize(
    "loaded",
    [
        '<script src="https://cdn.example/a.js"></script>',
        '<link rel="stylesheet" href="//fonts.example/css">',
        '<img src="http://example/a.png">',
        "<style>@import 'https://fonts.example/css';</style>",
        '<p style="background: url(https://example/a.png)">x</p>',
        '<pre class="mermaid">graph</pre>',
        '<a class="md-source" href="https://x.org" data-md-component="source">x</a>',
    ],
)
def test_what_a_page_loads_from_elsewhere_is_found(loaded: str) -> None:
    assert len(remote_sources(f"<html><body>{loaded}</body></html>")) == 1


def test_links_for_readers_and_own_files_are_not_loaded_from_elsewhere() -> None:
    page = '<link rel="canonical" href="https://x.org"><a href="https://y.org">y</a><script src="assets/a.js"></script>'
    assert remote_sources(page) == []
    assert remote_styles("src: url(../fonts/a.woff2)") == []


def test_pictures_are_those_that_would_be_drawn() -> None:
    assert {name: draw().svg() for name, draw in pictures.PICTURES.items()} == {
        path.name: path.read_text() for path in pictures.FOLDER.iterdir()
    }


@pytest.mark.parametrize("page", [page for page in OWN if page.partition("/")[0] not in _WITHOUT_COMMANDS])
def test_commands_and_their_settings_are_taken(page: str) -> None:
    for line in shell_lines((DOCS / page).read_text()):
        program = shlex.split(line, comments=True)[0]
        if program == "rachis":
            parse(line)
            check_settings(line)
        elif program == "make":
            assert {word for word in shlex.split(line)[1:] if "=" not in word} <= TARGETS, line


@pytest.mark.parametrize("page", OWN)
def test_settings_that_a_page_names_exist(page: str) -> None:
    text = re.sub(r"```.*?```", "", (DOCS / page).read_text(), flags=re.DOTALL)
    named = (
        {
            key
            for key in re.findall(r"`([a-z]+(?:\.[a-z_]+)+)(?:[=:][^`]*)?`", text)
            if key.partition(".")[0] in SECTIONS
        }
        - _OF_LIBRARIES
        - _OF_SCENARIOS
    )
    assert {key for key in named if not any(f"{entry}.".startswith(f"{key}.") for entry in KEYS)} == set()


def test_stages_that_tuning_begins_with_are_those_of_a_trace() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", (DOCS / "tune.md").read_text(), re.MULTILINE)
    assert len(rows) > 5
    assert set(rows) <= {stage.value for stage in TraceStage}


def test_a_setting_that_a_service_refuses_is_found() -> None:
    with pytest.raises(ConfigError, match="gpus_per_worker must be above 0"):
        check_settings("rachis serve --profile gpu-1node --set pools.prefill.gpus_per_worker=0")
