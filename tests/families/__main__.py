"""See the package. Families are tried one after the other, a minute each."""

import argparse
import asyncio
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from command_line.output import err, print_json
from kv_transfer.vllm_private import SUPPORTED_VLLM
from tests.families.tiny_models import FAMILIES
from tests.families.trial import TrialError, outcome_of
from tools import family_table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(FAMILIES))
    names: list[str] = parser.parse_args().names
    if unknown := set(names) - set(FAMILIES):
        parser.error(f"there is no family {', '.join(sorted(unknown))}; there are: {', '.join(FAMILIES)}")
    tried = asyncio.run(_tried(names or list(FAMILIES)))
    if names:
        print_json(tried)
    elif all("error" not in each for each in tried.values()):
        result = {"vllm": SUPPORTED_VLLM, "device": "cpu", "families": tried}
        family_table.RESULT.write_text(json.dumps(result, indent=1) + "\n")
        family_table.DOCUMENT.write_text(family_table.written(family_table.DOCUMENT.read_text()))
    for name, each in tried.items():
        if "error" in each:
            err.print(f"{name}: {each['error']}", markup=False)
    return int(any("error" in each for each in tried.values()))


async def _tried(names: list[str]) -> dict[str, dict[str, Any]]:
    tried: dict[str, dict[str, Any]] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns) as progress:
        task = progress.add_task("families", total=len(names))
        for name in names:
            progress.update(task, description=FAMILIES[name].title)
            with tempfile.TemporaryDirectory(prefix="rachis-family-") as folder:
                try:
                    outcome = asdict(await outcome_of(name, FAMILIES[name], Path(folder)))
                except TrialError as error:
                    outcome = {"error": str(error)}
            tried[name] = {"title": FAMILIES[name].title, "dtype": FAMILIES[name].dtype, **outcome}
            progress.advance(task)
    return tried


if __name__ == "__main__":
    sys.exit(main())
