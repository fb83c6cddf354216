"""Writes the pages of `docs/reference`; `--check` writes none, and exits with 1 where one is not up to date."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from tools.reference import calls, commands, configuration, errors, metrics, routes

FOLDER = Path(__file__).resolve().parent.parent.parent / "docs" / "reference"
PAGES: dict[str, Callable[[], str]] = {
    "configuration.md": configuration.page,
    "metrics.md": metrics.page,
    "errors.md": errors.page,
    "grpc.md": calls.page,
    "http.md": routes.page,
    "commands.md": commands.page,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    is_check = parser.parse_args().check
    stale = []
    for name, page in PAGES.items():
        text, path = page(), FOLDER / name
        if is_check and (not path.exists() or path.read_text() != text):
            stale.append(name)
        if not is_check:
            path.write_text(text)
    if stale:
        print(f"docs/reference: {', '.join(stale)} not up to date; `make map` writes them")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
