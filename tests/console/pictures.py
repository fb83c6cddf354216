"""Takes the pictures of docs/console.md: each view of the console, light and wide, and dark and narrow.

`python -m tests.console.pictures [FOLDER]`, by default docs/pictures. A service over fake engines is looked at.
"""

import asyncio
import base64
import io
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image

from tests import ROOT
from tests.console.browser import Page, chromium, opened_page
from tests.console.world import PREFIXES, Shown, shown_service

VIEWS = ("now", "requests", "pools", "decode", "placement", "prefixes")
LOOKS = (("light", 1280, 900), ("dark", 400, 860))
_COLOURS = 256
# The index of a fake registry is never read, and believed all the same.
SETTINGS: dict[str, Any] = {
    "index__max_staleness_s": 3600.0,
    "placement__disaggregation": "conditional",
    "placement__local_prefill_tokens": 64,
}
_READ_S = 11.0


async def busy(shown: Shown) -> str:
    """Requests of several kinds, some of which have ended; returns the name of one that has."""
    for number in range(12):
        await shown.cluster.generate(
            PREFIXES[number % len(PREFIXES)][0][:200], request_id=f"ask-{number}", max_tokens=24
        )
    shown.hold(7, PREFIXES[0][0][:120], position=6)
    shown.hold(4, PREFIXES[3][0][:120], position=6)
    shown.caches()
    return "ask-11"


async def take(page: Page, shown: Shown, folder: Path) -> None:
    ended = await busy(shown)
    await page.go(shown.url)
    await page.until("!!document.querySelector('.connection.live')")
    await asyncio.sleep(_READ_S)
    for scheme, width, height in LOOKS:
        await page.looks(width, height, scheme)
        for view in VIEWS:
            await page.value(f"location.hash = {f'requests/{ended}' if view == 'requests' else view!r}")
            await page.until("document.querySelector('h1') && !!document.querySelector('main table')")
            await asyncio.sleep(2.0)
            image = Image.open(io.BytesIO(base64.b64decode(await page.picture(whole=False))))
            image.quantize(_COLOURS, dither=Image.Dither.NONE).save(
                folder / f"console-{view}-{scheme}.png", optimize=True
            )


async def main(folder: Path) -> None:
    program = chromium()
    assert program is not None, "there is no Chromium on the PATH"
    with tempfile.TemporaryDirectory() as profile:
        async with shown_service(2, 4, **SETTINGS) as shown, opened_page(program, Path(profile)) as page:
            await take(page, shown, folder)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "pictures"))
