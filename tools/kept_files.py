"""Files that are written from their sources, and committed: `--check` writes none, and finds those that are not up to
date."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main(description: str | None, folder: Path, files: Mapping[str, Callable[[], str]]) -> int:
    """files: what stands in each, by its name in the folder. Returns 1 where `--check` finds a stale one."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--check", action="store_true")
    is_check = parser.parse_args().check
    stale = []
    for name, content in files.items():
        path, text = folder / name, content()
        if not is_check:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            stale.append(name)
    if stale:
        print(f"{folder.relative_to(ROOT)}: {', '.join(stale)} not up to date; `make map` writes them")
    return 1 if stale else 0
