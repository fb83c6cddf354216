"""What runbooks tell to look at is on a router's page, and what is on that page stands in the reference."""

import asyncio
import re
import urllib.request

from tests import ROOT
from tests.fakes.cluster import Cluster
from tools.metric_entries import ROUTER, entries

FOLDER = ROOT / "docs" / "runbooks"
RUNBOOKS = sorted(path for path in FOLDER.glob("*.md") if path.name != "README.md")


async def page(cluster: Cluster) -> str:
    def read() -> str:
        with urllib.request.urlopen(f"http://{cluster.router.metrics.address}/metrics", timeout=60) as response:
            text: str = response.read().decode()
            return text

    return await asyncio.to_thread(read)


async def test_every_figure_that_a_runbook_names_is_on_the_page_of_a_router(cluster: Cluster) -> None:
    told = re.findall(r"^# TYPE (\S+)", await page(cluster), re.MULTILINE)
    for path in RUNBOOKS:
        text = path.read_text()
        # A command may look for the beginning of a name.
        sought = re.findall(r"\^(rachis_\w+)", text)
        assert all(any(name.startswith(beginning.removesuffix("_bucket")) for name in told) for beginning in sought)
        named = set(re.findall(r"(?<!\^)\brachis_\w+", text))
        assert {name.removesuffix("_bucket") for name in named} <= set(told), path.stem


async def test_the_reference_says_of_every_figure_what_the_router_says(cluster: Cluster) -> None:
    text = await page(cluster)
    kinds = dict(re.findall(r"^# TYPE (rachis_\S+) (\w+)", text, re.MULTILINE))
    said = dict(re.findall(r"^# HELP (rachis_\S+) (.+)", text, re.MULTILINE))
    described = {entry.name: entry for entry in entries(ROUTER)}
    told = {name for name in kinds if not name.endswith("_created")}
    assert len(told) > 80
    assert {name: (described[name].kind, described[name].help) for name in told} == {
        name: (kinds[name], said[name]) for name in told
    }
