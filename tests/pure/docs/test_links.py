"""Documents name places that exist."""

import re
from pathlib import Path

import pytest

from tests import ROOT

_DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*/README.md")])
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
# A path of the project in code quotes: `control_plane/model/job.py`.
_QUOTED = re.compile(r"`((?:[a-z_]+/)+[a-z_]+\.(?:py|txt|yaml|toml))`")


@pytest.mark.parametrize("document", _DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_and_every_path_of_a_document_leads_somewhere(document: Path) -> None:
    text = document.read_text()
    links = [link for link in _LINK.findall(text) if "://" not in link]
    lost = [link for link in links if not (document.parent / link).exists()]
    if document.name != "CHANGELOG.md":
        lost += [path for path in _QUOTED.findall(text) if not (ROOT / path).exists()]
    assert lost == []


def test_the_first_screen_stays_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
