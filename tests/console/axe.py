"""What axe-core finds on a page: serious and critical things alone."""

from typing import Any

from tests import ROOT
from tests.console.browser import Page

SOURCE = ROOT / "node_modules" / "axe-core" / "axe.min.js"
_SERIOUS = ("serious", "critical")


async def findings(page: Page) -> list[str]:
    """Rule and first places of each."""
    if not await page.value("Boolean(window.axe)"):
        await page.value(SOURCE.read_text() + "; true")
    report: Any = await page.value(
        "axe.run(document, {resultTypes: ['violations']}).then((report) => report.violations.map((each) => "
        "({id: each.id, impact: each.impact, nodes: each.nodes.slice(0, 3).map((node) => node.html)})))"
    )
    return [f"{each['id']}: {each['nodes']}" for each in report if each["impact"] in _SERIOUS]
