"""What `rachis top` shows, and what a key changes of it. Pure: rows are dicts as `rachis status --json` has them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Column:
    """highest_first: by which a person looks for what is busy."""

    title: str
    value: Callable[[Row], Any]
    highest_first: bool = True
    is_number: bool = True
    text: Callable[[Any], str] = str


def _count(key: str) -> Callable[[Row], Any]:
    return lambda row: row[key]


def _used_share(row: Row) -> float:
    total = row["total_blocks"]
    return 1 - row["free_blocks"] / total if total else 0.0


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 100 else f"{value:.0f} s"


def _ms(value: float) -> str:
    return "-" if value < 0 else f"{value:.0f} ms"


WORKERS = (
    Column("worker", _count("worker_id"), False, False),
    Column("pool", _count("pool"), False, False),
    Column("state", lambda row: row["phase"] if row["state"] == "starting" else row["state"], False, False),
    Column("running", _count("running_requests")),
    Column("waiting", _count("waiting_requests")),
    Column("leased", _count("leased_handoffs")),
    Column("sessions", _count("open_sessions")),
    Column("blocks used", _used_share, text=lambda share: f"{share:.0%}"),
    Column("prompt tok/s", _count("prompt_tokens_per_s"), text=lambda rate: f"{rate:.0f}"),
    Column("tok/s", _count("generated_tokens_per_s"), text=lambda rate: f"{rate:.0f}"),
    Column("memory", _count("resident_bytes"), text=lambda size: f"{size >> 20} MiB"),
)
REQUESTS = (
    Column("request", _count("request_id"), False, False),
    Column("tenant", _count("tenant"), False, False, text=lambda tenant: tenant or "-"),
    Column("kind", _count("kind"), False, False),
    Column("stage", lambda row: row["outcome"] or row["stage"], False, False),
    Column("worker", lambda row: row["worker_id"] or "-", False, False),
    Column("in it", lambda row: row["stage_ms"] / 1000, text=_seconds),
    Column("age", lambda row: row["age_ms"] / 1000, text=_seconds),
    Column("TTFT", lambda row: row.get("ttft_ms", -1.0), text=_ms),
    Column("tokens", _count("completion_tokens"), text=lambda tokens: str(tokens or "-")),
    Column("moved", _count("migrations"), text=lambda times: str(times or "-")),
)


class Listing(Enum):
    """What each row is; the key of its name."""

    WORKERS = "worker_id"
    REQUESTS = "request_id"


_COLUMNS = {Listing.WORKERS: WORKERS, Listing.REQUESTS: REQUESTS}


@dataclass(frozen=True, slots=True)
class View:
    """sorted_by: a column of the listing. selected: the name of a row; none: the first. opened: the row that is shown
    alone, if any."""

    listing: Listing = Listing.WORKERS
    sorted_by: int = 0
    is_reversed: bool = False
    selected: str | None = None
    opened: str | None = None
    is_over: bool = False

    @property
    def columns(self) -> tuple[Column, ...]:
        return _COLUMNS[self.listing]

    def name_of(self, row: Row) -> str:
        return str(row[self.listing.value])

    def ordered(self, rows: Sequence[Row]) -> list[Row]:
        """By the column, and by name where that is equal."""
        column = self.columns[self.sorted_by]
        by_name = sorted(rows, key=self.name_of)
        return sorted(by_name, key=column.value, reverse=column.highest_first != self.is_reversed)

    def place(self, rows: Sequence[Row]) -> int:
        """Of the selected row among those that are ordered; one that is gone leaves the selection to the first."""
        names = [self.name_of(row) for row in rows]
        return names.index(self.selected) if self.selected in names else 0

    def after(self, key: str, rows: Sequence[Row]) -> "View":
        """rows: that are shown, ordered. A key that means nothing changes nothing."""
        match key:
            case "q" | "ctrl-c":
                return replace(self, is_over=True)
            case "escape" | "backspace":
                return replace(self, opened=None)
            case "w":
                return View(Listing.WORKERS)
            case "r":
                return View(Listing.REQUESTS, sorted_by=_index(REQUESTS, "age"))
            case "s":
                return replace(self, sorted_by=(self.sorted_by + 1) % len(self.columns), is_reversed=False)
            case "S":
                return replace(self, is_reversed=not self.is_reversed)
            case "down" | "j" | "up" | "k" if rows and self.opened is None:
                step = 1 if key in ("down", "j") else -1
                place = min(len(rows) - 1, max(0, self.place(rows) + step))
                return replace(self, selected=self.name_of(rows[place]))
            case "enter" if rows and self.opened is None:
                name = self.name_of(rows[self.place(rows)])
                return replace(self, selected=name, opened=name)
            case _:
                return self


def window(place: int, count: int, room: int) -> range:
    """Which of so many rows fit, the selected one among them."""
    first = max(0, min(place - room // 2, count - room))
    return range(first, min(count, first + max(0, room)))


def with_rates(workers: Sequence[Row], before: Sequence[Row], elapsed_s: float) -> list[Row]:
    """Workers with tokens a second since `before`; nothing where one was not there, or has begun anew."""
    former = {(row["worker_id"], row["generation"]): row for row in before}
    rated: list[Row] = []
    for row in workers:
        last = former.get((row["worker_id"], row["generation"]))
        rates = {
            f"{name}_per_s": max(0, row[name] - last[name]) / elapsed_s if last is not None and elapsed_s > 0 else 0.0
            for name in ("prompt_tokens", "generated_tokens")
        }
        rated.append({**row, **rates})
    return rated


def _index(columns: Sequence[Column], title: str) -> int:
    return next(place for place, column in enumerate(columns) if column.title == title)
