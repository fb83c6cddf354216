"""Writes every reproduced table: python -m benchmarks.papers [--quick] [--only PAPER] [--to FOLDER]."""

import argparse
import json
import sys
from importlib import import_module
from pathlib import Path

from rich.console import Console

from benchmarks.papers.table import Cell, as_json, markdown

PAPERS = {
    "stream2llm": "Stream2LLM (arXiv 2604.16395): Figure 8, Tables 3 and 4",
    "feather": "FEATHER: Figures 5.1 to 5.4 and 5.14",
    "hotprefix": "HotPrefix (doi 10.1145/3749168): Figures 8, 14 and 15",
}
_NOTE = (
    "What the paper prints beside what the simulator finds, with the production schedulers, tiers and policies over "
    "cost models from public figures. No constant is tuned to a cell. A ratio of 1 is agreement; `-` is what the paper "
    "does not print or the simulator cannot say. Made by `make bench-papers`."
)
_RESULTS = Path(__file__).parent.parent / "results"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.papers", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer cells and shorter runs")
    parser.add_argument("--only", choices=PAPERS, action="append", help="one paper; may be given more than once")
    parser.add_argument("--to", type=Path, default=_RESULTS, help="folder for the tables")
    given = parser.parse_args()
    if not given.to.is_dir():
        sys.exit(f"--to: {given.to} is no folder")
    err = Console(stderr=True, highlight=False)
    for name in given.only or PAPERS:
        with err.status(name) as status:
            cells: list[Cell] = import_module(f"benchmarks.papers.{name}").run(
                lambda text, name=name: status.update(f"{name}: {text}"),
                quick=given.quick,
            )
        (given.to / f"papers-{name}.json").write_text(json.dumps(as_json(cells), indent=1) + "\n")
        (given.to / f"papers-{name}.md").write_text(markdown(PAPERS[name], cells, _NOTE))
        err.print(f"{name}: {len(cells)} cells, written to {given.to / f'papers-{name}.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
