"""What a paper says and what the simulator finds, side by side."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

# Told of what runs now.
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Cell:
    """One value of a figure or table."""

    figure: str
    cell: str
    unit: str
    # As printed, or (least, most) where a range is printed for several cells; None: only drawn, or not said.
    paper: float | tuple[float, float] | None
    # None where the simulator cannot say.
    ours: float | None
    # What explains a difference, and what stands in for what.
    why: str = ""

    @property
    def ratio(self) -> float | None:
        """Ours over the paper's; 1 inside a printed range, over its nearer end outside."""
        if self.paper is None or self.ours is None:
            return None
        if not isinstance(self.paper, tuple):
            return self.ours / self.paper if self.paper else None
        least, most = self.paper
        nearest = min(max(self.ours, least), most)
        return self.ours / nearest if nearest else None


def as_json(cells: Iterable[Cell]) -> list[dict[str, Any]]:
    """For machines: four significant digits."""
    return [
        {
            "figure": each.figure,
            "cell": each.cell,
            "unit": each.unit,
            "paper": [*map(_rounded, each.paper)] if isinstance(each.paper, tuple) else _rounded(each.paper),
            "simulator": _rounded(each.ours),
            "ratio": _rounded(each.ratio),
            "why": each.why,
        }
        for each in cells
    ]


def markdown(title: str, cells: Sequence[Cell], note: str = "") -> str:
    """A page with one table for each figure, in the order of the cells."""
    parts = [f"# {title}", *([note] if note else [])]
    for figure in dict.fromkeys(each.figure for each in cells):
        rows = ["| cell | unit | paper | simulator | ratio | why |", "|---|---|---|---|---|---|"]
        rows += [_row(each) for each in cells if each.figure == figure]
        parts += [f"## {figure}", "\n".join(rows)]
    return "\n\n".join(parts) + "\n"


def _row(cell: Cell) -> str:
    paper = " to ".join(map(_text, cell.paper)) if isinstance(cell.paper, tuple) else _text(cell.paper)
    return f"| {cell.cell} | {cell.unit} | {paper} | {_text(cell.ours)} | {_text(cell.ratio)} | {cell.why} |"


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
