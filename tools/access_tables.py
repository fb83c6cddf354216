"""Writes the tables of `docs/access.md` from those that the door goes by; `--check` exits with 1 where they differ."""

import sys
from collections.abc import Mapping

from control_plane.access.doors import DoorKind, doors_of
from control_plane.access.roles import HTTP_NEEDS, METRICS_NEEDS, RPC_NEEDS, Identity, Need, Role
from control_plane.console.admin_calls import METHODS
from tools.kept_files import ROOT, main

DOCUMENT = ROOT / "docs" / "access.md"
_BEGIN, _END = "<!-- tables: `make map` writes them -->\n", "<!-- end of the tables -->\n"


def written(document: str) -> str:
    """The document with the tables as they are now."""
    before, _, rest = document.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    rpcs = {method.removeprefix("/"): need for method, need in RPC_NEEDS.items()}
    console = {
        "/": Need.NOTHING,
        "/static/{file}": Need.NOTHING,
        **{f"/api/{name}": RPC_NEEDS[method] for name, method in METHODS.items()},
    }
    tables = (
        _table("call", rpcs, {method: _at(method) for method in rpcs}),
        _table("HTTP route", HTTP_NEEDS),
        _table("route of a router's metrics, with `security.metrics_need_key`", METRICS_NEEDS),
        _table("route of the console", console),
    )
    return f"{before}{_BEGIN}{chr(10).join(tables)}{_END}{after}"


def _at(method: str) -> str:
    """At which doors it is answered, where there are two."""
    doors = doors_of(f"/{method}")
    return "both" if doors == tuple(DoorKind) else " ".join(doors)


def _table(what: str, needs: Mapping[str, Need], doors: Mapping[str, str] | None = None) -> str:
    columns = [what, *(["door"] if doors else []), "without a key", *(f"`{role}`" for role in Role)]
    rows = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name, need in needs.items():
        who = [need is Need.NOTHING, *(Identity("", "", frozenset({role}), 0).may(need) for role in Role)]
        cells = [f"`{name}`", *([doors[name]] if doors else []), *("yes" if each else "-" for each in who)]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.exit(main(__doc__, DOCUMENT.parent, {DOCUMENT.name: lambda: written(DOCUMENT.read_text())}))
