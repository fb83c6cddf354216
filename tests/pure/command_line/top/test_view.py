"""What keys make of the view of `rachis top`, and what is drawn of it."""

from io import StringIO
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from command_line.top.keyboard import names_of
from command_line.top.screen import details, screen
from command_line.top.view import REQUESTS, WORKERS, Listing, Row, View, window, with_rates


def worker(name: str, **values: Any) -> dict[str, Any]:
    idle = {
        "worker_id": name, "pool": "decode", "state": "ready", "phase": "ready", "generation": 1, "running_requests": 0,
        "waiting_requests": 0, "leased_handoffs": 0, "open_sessions": 0, "free_blocks": 10, "total_blocks": 10,
        "prompt_tokens": 0, "generated_tokens": 0, "prompt_tokens_per_s": 0.0, "generated_tokens_per_s": 0.0,
        "resident_bytes": 5 << 20, "imitates": "", "complaints": [],
    }  # fmt: skip
    return idle | values


def request(name: str, **values: Any) -> dict[str, Any]:
    running = {
        "request_id": name, "tenant": "", "kind": "request", "outcome": "", "stage": "decode", "worker_id": "decode-0",
        "stage_ms": 500.0, "age_ms": 1500.0, "completion_tokens": 0, "migrations": 0,
    }  # fmt: skip
    return running | values


def service(*workers: Row, **values: Any) -> dict[str, Any]:
    healthy = {
        "service_id": "svc-a", "address": "127.0.0.1:1", "uptime_s": 5.0, "in_flight_requests": 3, "queued_requests": 1,
        "open_sessions": 2, "workers": workers, "outcomes": {"finished": 7}, "registry_connected": True, "said": "",
        "unlisted": 0,
        "pools": {"decode": {"ready_workers": 1, "desired_workers": 2}},
    }  # fmt: skip
    return healthy | values


def drawn(view: View, told: dict[str, Any], rows: list[Row], *, height: int = 30, width: int = 110) -> list[str]:
    console = Console(width=width, height=height, record=True, file=StringIO())
    console.print(screen(view, told, rows, None, height))
    return console.export_text().splitlines()


def names(view: View, rows: list[Row]) -> list[str]:
    return [view.name_of(row) for row in view.ordered(rows)]


FLEET: list[Row] = [
    worker("decode-0", running_requests=2, free_blocks=5),
    worker("decode-1", running_requests=9),
    worker("prefill-0", pool="prefill", running_requests=2),
]


def pressed(view: View, keys: str | list[str], rows: list[Row]) -> View:
    for key in keys:
        view = view.after(key, view.ordered(rows))
    return view


def test_rows_are_by_name_until_somebody_sorts_them() -> None:
    view = View()
    assert names(view, FLEET) == ["decode-0", "decode-1", "prefill-0"]

    by_running = pressed(view, "sss", FLEET)
    assert by_running.columns[by_running.sorted_by].title == "running"
    assert names(by_running, FLEET) == ["decode-1", "decode-0", "prefill-0"], "the busiest first, then by name"
    assert names(pressed(by_running, "S", FLEET), FLEET)[-1] == "decode-1"


def test_every_column_may_be_sorted_by() -> None:
    for listing, columns, rows in ((Listing.WORKERS, WORKERS, FLEET), (Listing.REQUESTS, REQUESTS, [request("a")])):
        view = View(listing)
        for _ in columns:
            assert len(view.ordered(rows)) == len(rows)
            view = view.after("s", rows)
        assert view.sorted_by == 0


def test_the_selection_stays_with_its_row_and_not_with_its_place() -> None:
    view = pressed(View(), ["down"], FLEET)
    assert view.selected == "decode-1"

    by_running = pressed(view, "sss", FLEET)
    assert by_running.place(by_running.ordered(FLEET)) == 0
    assert view.place([FLEET[0]]) == 0, "its row is gone"
    assert pressed(view, ["up", "up", "up"], FLEET).selected == "decode-0"
    assert pressed(view, ["j"] * 9, FLEET).selected == "prefill-0"


def test_enter_opens_what_is_selected_and_escape_closes_it() -> None:
    opened = pressed(View(), ["down", "enter"], FLEET)
    assert opened.opened == "decode-1"
    assert pressed(opened, ["down"], FLEET).opened == "decode-1"
    assert pressed(opened, ["escape"], FLEET) == pressed(View(), ["down"], FLEET)


def test_requests_come_with_the_longest_first() -> None:
    rows: list[Row] = [request("new", age_ms=10.0), request("old", age_ms=9e5)]
    assert names(View().after("r", []), rows) == ["old", "new"]


@given(st.lists(st.sampled_from([*"qwrsSjkx?", "enter", "escape", "down", "up"]), max_size=30), st.integers(0, 3))
def test_no_keys_break_it(keys: list[str], workers: int) -> None:
    view = View()
    rows: dict[Listing, list[Row]] = {
        Listing.WORKERS: FLEET[:workers],
        Listing.REQUESTS: [request("a")] * (workers > 1),
    }
    for key in keys:
        view = view.after(key, view.ordered(rows[view.listing]))
        ordered = view.ordered(rows[view.listing])
        assert drawn(view, service(*FLEET[:workers]), ordered)
        assert not ordered or 0 <= view.place(ordered) < len(ordered)
    assert view.is_over == ("q" in keys)


@given(st.integers(0, 500), st.integers(0, 500), st.integers(0, 60))
def test_the_selected_row_is_among_those_that_fit(place: int, count: int, room: int) -> None:
    shown = window(min(place, max(0, count - 1)), count, room)
    assert len(shown) == min(count, room)
    assert not shown or min(place, count - 1) in shown


def test_a_screen_is_no_larger_than_the_terminal() -> None:
    many: list[Row] = [worker(f"decode-{number}") for number in range(1000)]
    lines = drawn(View(), service(*many), many, height=24)
    assert len(lines) <= 24 and "more workers" in lines[-2]
    assert max(map(len, drawn(View(), service(*many), many, width=60))) <= 60


def test_what_is_wrong_stands_above() -> None:
    ill = worker("decode-0", complaints=["gets no requests: why"], imitates="h100-x")
    told = service(ill, registry_connected=False, said="the router does not answer: gone", unlisted=7)
    lines = drawn(View(), told, [ill])
    text = "\n".join(lines)
    for sentence in (
        "Redis",
        "decode-0 gets no requests",
        "compute nothing",
        "does not answer: gone",
        "7 requests run",
    ):
        assert sentence in text


def test_hostile_names_are_text() -> None:
    rows: list[Row] = [request("[red]x[/red]", tenant="[bold]")]
    assert "[red]x[/red]" in "\n".join(drawn(View(Listing.REQUESTS), service(), rows))
    assert details(rows[0]).row_count == len(rows[0])


def test_rates_are_those_since_the_last_look() -> None:
    before = [worker("decode-0", generated_tokens=100), worker("decode-1", generated_tokens=500)]
    now = [
        worker("decode-0", generated_tokens=300),
        worker("decode-1", generation=2, generated_tokens=900),
        worker("decode-2", generated_tokens=7),
    ]
    assert [row["generated_tokens_per_s"] for row in with_rates(now, before, 2.0)] == [100.0, 0.0, 0.0]
    assert with_rates(now, before, 0.0)[0]["generated_tokens_per_s"] == 0.0


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("rq", ["r", "q"]),
        ("\x1b[A\x1b[Bs", ["up", "down", "s"]),
        ("\x1b", ["escape"]),
        ("\r\x7f\x03", ["enter", "backspace", "ctrl-c"]),
        ("é", ["é"]),
    ],
)
def test_keys_have_names(text: str, keys: list[str]) -> None:
    assert list(names_of(text)) == keys
