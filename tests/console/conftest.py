"""A page of Chromium that looks at a service over fake engines."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.console import axe
from tests.console.browser import Page, chromium, opened_page


@pytest.fixture(scope="session")
def program() -> str:
    """Chromium and axe-core, as `make test-console` installs them."""
    found = chromium()
    if found is None:
        pytest.skip("no Chromium on the PATH: `make test-console` installs it")
    if not axe.SOURCE.exists():
        pytest.skip(f"no {axe.SOURCE.name} in node_modules: `make test-console` installs it")
    return found


@pytest_asyncio.fixture
async def page(program: str, tmp_path: Path) -> AsyncIterator[Page]:
    """Its host's clock is wrong by years; whatever a script of somebody else's did would be seen in `window.hacked`."""
    async with opened_page(program, tmp_path) as page:
        await page.before_scripts("Date.now = () => 7; window.hacked = false;")
        yield page
        assert not page.said, page.said
