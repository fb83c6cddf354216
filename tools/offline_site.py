"""Whether the built site asks the network for anything while it is read: exits with 1, and names what does.

`python tools/offline_site.py site`. Links that a reader may follow are no matter. What a page loads by itself is:
scripts, styles, fonts, pictures, frames. So is what the theme's script would load for a page that has diagrams, or
names its repository.
"""

import argparse
import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

# What a browser loads by itself.
_LOADED = {
    "script": "src", "img": "src", "iframe": "src", "link": "href", "source": "src", "video": "src", "audio": "src",
    "embed": "src", "object": "data",
}  # fmt: skip
# Of <link>: what stands there for readers and search engines, and is not loaded.
_NOT_LOADED = {"canonical", "next", "prev", "alternate", "author", "license"}
_REMOTE = re.compile(r"(?:https?:)?//")
_STYLES = re.compile(r"<style[^>]*>(.*?)</style>", re.DOTALL)
_STYLE = re.compile(r"""(?:url\(\s*|@import\s+)["']?((?:https?:)?//[^"')\s;]+)""")


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        source = values.get(_LOADED.get(tag, "")) or ""
        if _REMOTE.match(source) and values.get("rel") not in _NOT_LOADED:
            self.found.append(f"<{tag}> loads {source}")
        if "mermaid" in (values.get("class") or "").split():
            self.found.append("a diagram that the theme loads a script for")
        if values.get("data-md-component") == "source":
            self.found.append("a repository of which the theme asks for figures")
        self.found += remote_styles(values.get("style") or "")


def remote_sources(page: str) -> list[str]:
    """What a page of HTML would load from elsewhere, a sentence each."""
    parser = _Page()
    parser.feed(page)
    for style in _STYLES.findall(page):
        parser.found += remote_styles(style)
    return parser.found


def remote_styles(style: str) -> list[str]:
    return [f"a style loads {address}" for address in _STYLE.findall(style)]


def findings(site: Path) -> Iterator[str]:
    for path in sorted(site.rglob("*.html")):
        yield from (f"{path.relative_to(site)}: {found}" for found in remote_sources(path.read_text()))
    for path in sorted(site.rglob("*.css")):
        yield from (f"{path.relative_to(site)}: {found}" for found in remote_styles(path.read_text()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path)
    site = parser.parse_args().site
    pages = len(list(site.rglob("*.html")))
    found = list(findings(site))
    print("\n".join(found) or f"{site}: {pages} pages, nothing in them is loaded from elsewhere")
    return 1 if found or not pages else 0


if __name__ == "__main__":
    sys.exit(main())
