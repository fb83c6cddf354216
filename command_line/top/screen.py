"""A `View` as something that Rich draws, as large as the terminal. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from command_line.output import computes_nothing
from command_line.top.view import Listing, Row, View, window

_KEYS = "w workers  r requests  s sort  S reverse  ↑↓ select  ⏎ open  esc back  q quit"
# Below the service's: the heading, how many rows there are more, the keys.
_LINES_AROUND = 3
# One line for each thing that is wrong.
_MOST_ALARMS = 6


def screen(
    view: View, service: Mapping[str, Any], rows: Sequence[Row], opened: RenderableType | None, height: int
) -> Group:
    """service: as `rachis status --json`, with `unlisted`, how many requests run that are not among the rows, and
    `said`, what could not be asked. rows: of the listing, ordered. opened: what is shown in their place. height: lines
    of the terminal."""
    head = [*_heading(service), Text("")]
    if opened is not None:
        return Group(*head, opened, Text(_KEYS, style="dim"))
    return Group(*head, *_listing(view, rows, height - len(head) - _LINES_AROUND), Text(_KEYS, style="dim"))


def details(row: Row) -> Table:
    """Everything that is known of one row."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for key, value in row.items():
        table.add_row(key, escape(str(value)))
    return table


def _heading(service: Mapping[str, Any]) -> Iterable[Text]:
    workers = service["workers"]
    tokens_per_s = sum(worker["generated_tokens_per_s"] for worker in workers)
    yield Text(
        f"{service['service_id']} on {service['address']}  up {service['uptime_s']:.0f} s  "
        f"{service['in_flight_requests']} running  {service['queued_requests']} queued  "
        f"{service['open_sessions']} sessions  {tokens_per_s:.0f} tok/s",
        style="bold", overflow="ellipsis", no_wrap=True,
    )  # fmt: skip
    pools = (
        f"{name} {pool['ready_workers']}/{pool['desired_workers']} ready" for name, pool in service["pools"].items()
    )
    outcomes = (f"{name} {count}" for name, count in sorted(service["outcomes"].items()))
    yield Text("  ".join((*pools, *outcomes)), overflow="ellipsis", no_wrap=True)
    alarms = [service["said"]] if service["said"] else []
    alarms += [] if service["registry_connected"] else ["the registry (Redis) does not answer"]
    alarms += [f"{service['unlisted']} requests run that are not listed"] if service["unlisted"] else []
    alarms += sorted({computes_nothing(worker["imitates"]) for worker in workers if worker["imitates"]})
    alarms += [f"{worker['worker_id']} {complaint}" for worker in workers for complaint in worker["complaints"]]
    if len(alarms) > _MOST_ALARMS:
        alarms[_MOST_ALARMS - 1 :] = [f"{len(alarms) - _MOST_ALARMS + 1} more that is wrong: `rachis status`"]
    for alarm in alarms:
        yield Text(alarm, style="bold red", overflow="ellipsis", no_wrap=True)


def _listing(view: View, rows: Sequence[Row], room: int) -> Iterable[RenderableType]:
    table = Table(box=None, pad_edge=False, header_style="bold", expand=True)
    for number, column in enumerate(view.columns):
        is_down = column.highest_first != view.is_reversed
        mark = ("▼" if is_down else "▲") if number == view.sorted_by else ""
        table.add_column(
            column.title + mark, justify="right" if column.is_number else "left", no_wrap=True, overflow="ellipsis"
        )
    place = view.place(rows)
    shown = window(place, len(rows), max(1, room))
    for number in shown:
        cells = (escape(column.text(column.value(rows[number]))) for column in view.columns)
        table.add_row(*cells, style="reverse" if number == place else "")
    yield table
    what = "workers" if view.listing is Listing.WORKERS else "requests"
    if not rows:
        yield Text(f"no {what}", style="dim")
    elif len(shown) < len(rows):
        yield Text(f"{len(rows) - len(shown)} more {what}", style="dim")
