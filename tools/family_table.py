"""Writes the table of `docs/models.md` from what `make families` measured; `--check` exits with 1 where it differs."""

import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from tools.kept_files import ROOT, main

DOCUMENT = ROOT / "docs" / "models.md"
RESULT = ROOT / "benchmarks" / "results" / "model-families.json"
_BEGIN, _END = "<!-- table: `make map` writes it -->\n", "<!-- end of the table -->\n"
_NOT_SHOWN = "not shown: "
_COLUMNS = ("hand-off", "prefix cache", "prefix index", "tiers", "sessions", "decode batches")


def written(document: str) -> str:
    """The document with the table as it was measured last."""
    before, _, rest = document.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}{table(json.loads(RESULT.read_text()))}{_END}{after}"


def table(result: Mapping[str, Any]) -> str:
    """A row for each family; the sentences stand below, once each."""
    families = list(result["families"].values())
    sentences = list(dict.fromkeys(each for family in families for each in _refusals(family)))
    rows = [
        f"vLLM {result['vllm']}, on a CPU; every answer is that of a plain vLLM.",
        "",
        f"| family | computed in | {' | '.join(_COLUMNS)} | answers compared |",
        f"|---|---|{'---|' * len(_COLUMNS)}---|",
    ]
    for family in families:
        cells = [_cell(family["features"].get(column), sentences) for column in _COLUMNS]
        answers = f"{family['answers']}, {family['distinct_answers']} different" if family["answers"] else "-"
        rows.append(f"| {family['title']} | {family['dtype']} | {' | '.join(cells)} | {answers} |")
    return "\n".join([*rows, "", *(f"{at}. {_shown(each)}" for at, each in enumerate(sentences, 1))]) + "\n"


def _refusals(family: Mapping[str, Any]) -> Iterator[str]:
    return (answer for answer in family["features"].values() if answer != "yes")


def _shown(sentence: str) -> str:
    return sentence.removeprefix(_NOT_SHOWN).removeprefix("model.path: ")


def _cell(answer: str | None, sentences: list[str]) -> str:
    if answer is None:
        return "-"
    if answer == "yes":
        return answer
    kind = "not shown" if answer.startswith(_NOT_SHOWN) else "no"
    return f"{kind} ({sentences.index(answer) + 1})"


if __name__ == "__main__":
    sys.exit(main(__doc__, DOCUMENT.parent, {DOCUMENT.name: lambda: written(DOCUMENT.read_text())}))
