"""The files that the console's page is made of, as they lie in this package, and what a browser may do with them."""

from collections.abc import Mapping
from importlib import resources
from typing import NamedTuple

from control_plane.console.guards import JSON

_FOLDER = resources.files("control_plane.console") / "static"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".json": JSON,
}
# Nothing comes from elsewhere, and nothing that stands in a name can become a script.
SECURITY_HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
        "trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class StaticFile(NamedTuple):
    content_type: str
    body: bytes


def static_files() -> Mapping[str, StaticFile]:
    """By the path under which each is served; there are no others."""
    files = {f"/static/{path}": file for path, file in _within(_FOLDER, "")}
    return {"/": files["/static/index.html"], **files}


def _within(folder: resources.abc.Traversable, before: str) -> list[tuple[str, StaticFile]]:
    found = []
    for each in sorted(folder.iterdir(), key=lambda each: each.name):
        suffix = f".{each.name.rpartition('.')[2]}"
        if each.is_dir():
            found += _within(each, f"{before}{each.name}/")
        elif suffix in _TYPES:
            found.append((f"{before}{each.name}", StaticFile(_TYPES[suffix], each.read_bytes())))
    return found
