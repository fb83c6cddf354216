"""What runbooks tell to look at is on a router's page."""

import asyncio
import re
import urllib.request

from tests import ROOT
from tests.fakes.cluster import Cluster

FOLDER = ROOT / "docs" / "runbooks"
RUNBOOKS = sorted(path for path in FOLDER.glob("*.md") if path.name != "README.md")


async def test_every_figure_that_a_runbook_names_is_on_the_page_of_a_router(cluster: Cluster) -> None:
    def page() -> str:
        with urllib.request.urlopen(f"http://{cluster.router.metrics.address}/metrics", timeout=60) as response:
            text: str = response.read().decode()
            return text

    told = re.findall(r"^# TYPE (\S+)", await asyncio.to_thread(page), re.MULTILINE)
    for path in RUNBOOKS:
        text = path.read_text()
        # A command may look for the beginning of a name.
        sought = re.findall(r"\^(rachis_\w+)", text)
        assert all(any(name.startswith(beginning.removesuffix("_bucket")) for name in told) for beginning in sought)
        named = set(re.findall(r"(?<!\^)\brachis_\w+", text))
        assert {name.removesuffix("_bucket") for name in named} <= set(told), path.stem
