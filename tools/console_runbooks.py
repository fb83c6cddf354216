"""Writes the runbooks that the console shows, each by its name; `--check` exits with 1 where they differ."""

import json
import sys

from tools.kept_files import ROOT, main

_RUNBOOKS = ROOT / "docs" / "runbooks"
_STATIC = ROOT / "control_plane" / "console" / "static"


def written() -> str:
    """One line for each runbook."""
    texts = {path.stem: path.read_text() for path in sorted(_RUNBOOKS.glob("Rachis*.md"))}
    return json.dumps(texts, indent=0) + "\n"


if __name__ == "__main__":
    sys.exit(main(__doc__, _STATIC, {"runbooks.json": written}))
