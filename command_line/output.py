"""How commands speak: tables and sentences for people, one JSON object for machines."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


def print_json(result: dict[str, Any]) -> None:
    """One line, the last of standard output."""
    print(json.dumps(result, separators=(", ", ": ")), flush=True)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    out.print(made_table(title, columns, rows))


def made_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    """Cells are shown as they are: an address in brackets is no markup."""
    table = Table(title=escape(title), title_justify="left", box=None, pad_edge=False, header_style="bold")
    cells = [[escape(str(cell)) for cell in row] for row in rows]
    for column, width in zip(columns, column_widths([columns, *cells], out.width), strict=True):
        table.add_column(column, overflow="fold", width=width)
    for row in cells:
        table.add_row(*row)
    return table


def column_widths(rows: Sequence[Sequence[str]], terminal: int) -> list[int]:
    """As the cells are where all fit the terminal; else words stay whole as far as there is room, and the columns that
    lack most get what is left. rows: at least one, of markup."""
    columns = [[Text.from_markup(cell).plain for cell in column] for column in zip(*rows, strict=True)]
    whole = [max((cell_len(line) for cell in column for line in cell.splitlines()), default=0) for column in columns]
    words = [max((cell_len(word) for cell in column for word in cell.split()), default=0) for column in columns]
    room = terminal - 2 * (len(columns) - 1)
    if sum(whole) <= room:
        return whole
    most = max((each for each in range(1, terminal + 1) if sum(min(word, each) for word in words) <= room), default=1)
    widths = [max(1, min(word, most)) for word in words]
    for _ in range(room - sum(widths)):
        lacking = [need - has for need, has in zip(whole, widths, strict=True)]
        widths[lacking.index(max(lacking))] += 1
    return widths


def short_number(number: int) -> str:
    """At least three digits, and mostly not more than six characters: 99999, 1234k, 512M."""
    for letter, unit in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= 100 * unit:
            return f"{number // unit}{letter}"
    return str(number)


def computes_nothing(cost_model: str) -> str:
    """What has to be said wherever figures of imitated GPUs are shown."""
    return f"imitated GPUs: they compute nothing, take the time of {cost_model}, and answer with arbitrary tokens"


def times_text(ratio: float | None) -> str:
    """How many times another figure one is; None: there is no other."""
    return "-" if ratio is None else f"{ratio:.2f}"


class PhaseDisplay:
    """What each part is doing, a line for each: live in a terminal, a line per change elsewhere."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, Any] = {}
        self._phases: dict[str, str] = {}

    def show(self, part: str, phase: str) -> None:
        if self._phases.get(part) == phase:
            return
        self._phases[part] = phase
        if not self._progress.live.is_started:
            err.print(f"{part:<12} {phase}", markup=False)
        elif part in self._tasks:
            self._progress.update(self._tasks[part], phase=phase)
        else:
            self._tasks[part] = self._progress.add_task(part, phase=phase, total=None)


@contextmanager
def phases() -> Iterator[PhaseDisplay]:
    """Progress while a service starts or stops, on standard error."""
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description:<12}", markup=False),
        TextColumn("{task.fields[phase]}", markup=False),
        TimeElapsedColumn(),
        console=err,
        transient=True,
    )
    if not err.is_terminal:
        yield PhaseDisplay(progress)
        return
    with progress:
        yield PhaseDisplay(progress)
