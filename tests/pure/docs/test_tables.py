"""Tables of the guides say what the schema and the metrics say."""

import re
from typing import Any

import pytest

from cluster_configs.loading import load
from tests import ROOT
from tools.metric_entries import GATEWAY, ROUTER, entries

DEFAULTS = {entry.key: entry.value for entry in load().entries}
METRICS = {entry.name for entry in entries(ROUTER) + entries(GATEWAY)}
# Guides with tables of keys and defaults, and the sections that keys without one belong to.
GUIDES = {
    "streaming.md": ("",),
    "tiers.md": ("tiers.",),
    "decode.md": ("decode.",),
    "placement.md": ("",),
    "http.md": ("gateway.websocket.", "gateway.stored_responses."),
}
_HEAD = re.compile(r"^\| key[^|]*\| default \|.*\n\|[-|]+\n((?:\|.*\n)+)", re.MULTILINE)
_ROW = re.compile(r"^\| ([^|]+) \| ([^|]+) \|", re.MULTILINE)


def rows(guide: str) -> list[tuple[str, str]]:
    """Key and default of each row of one key."""
    text = (ROOT / "docs" / guide).read_text()
    found = [row for body in _HEAD.findall(text) for row in _ROW.findall(body)]
    return [(key.strip("` "), default.strip("` ")) for key, default in found if "," not in key]


def said(value: Any) -> set[str]:
    """How a default may be written."""
    if isinstance(value, bool):
        return {"on" if value else "off"}
    if value is None:
        return {"none", "null"}
    if isinstance(value, float) and value.is_integer():
        return {str(int(value)), f"{int(value):,}"}
    return {str(value), f"{value:,}"} if isinstance(value, int) else {str(value)}


@pytest.mark.parametrize(("guide", "sections"), GUIDES.items())
def test_defaults_are_those_of_the_schema(guide: str, sections: tuple[str, ...]) -> None:
    found = rows(guide)
    assert len(found) > 2
    for key, default in found:
        values = [DEFAULTS[f"{section}{key}"] for section in sections if f"{section}{key}" in DEFAULTS]
        assert any(default.partition(" (")[0] in said(value) for value in values), (key, default, values)


@pytest.mark.parametrize("guide", sorted(path.name for path in (ROOT / "docs").glob("*.md")))
def test_metrics_that_a_guide_names_exist(guide: str) -> None:
    named = set(re.findall(r"`(rachis_\w+)[`{\[]", (ROOT / "docs" / guide).read_text()))
    # Resources of Ray's, by which nodes are told apart, begin so, too.
    assert named - METRICS - {"rachis_prefill", "rachis_decode"} == set()
