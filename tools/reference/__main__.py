"""Writes the pages of `docs/reference`; `--check` writes none, and exits with 1 where one is not up to date."""

import sys
from collections.abc import Callable

from tools.kept_files import ROOT, main
from tools.reference import calls, commands, configuration, errors, metrics, routes

FOLDER = ROOT / "docs" / "reference"
PAGES: dict[str, Callable[[], str]] = {
    "configuration.md": configuration.page,
    "metrics.md": metrics.page,
    "errors.md": errors.page,
    "grpc.md": calls.page,
    "http.md": routes.page,
    "commands.md": commands.page,
}


if __name__ == "__main__":
    sys.exit(main(__doc__, FOLDER, PAGES))
