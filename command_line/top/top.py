"""`rachis top`: asks the router once in an interval, and draws what it says until somebody has seen enough."""

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any

import grpc
import typer
from google.protobuf.json_format import MessageToDict
from rachis import AsyncClient
from rachis.v1 import admin_pb2 as admin
from rich.console import RenderableType
from rich.live import Live
from rich.text import Text

from cluster_core.clock import monotonic_s
from cluster_core.errors import ConfigError
from command_line import options
from command_line.output import out
from command_line.router_admin import TIMEOUT_S
from command_line.status.overview import ask
from command_line.top.keyboard import keyboard
from command_line.top.screen import details, screen
from command_line.top.view import Listing, Row, View, with_rates
from command_line.trace import answer_view, trace_of

_MOST_REQUESTS = 500


def register(app: typer.Typer) -> None:
    app.command("top")(top_command)


def top_command(
    interval_s: Annotated[float, typer.Option(min=0.2, max=60, help="Between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print workers and requests once, and end.")] = False,
    address: options.Address = None,
) -> None:
    """What the service does now, drawn again and again; keys sort it and open a worker or a request."""
    if not once and not (sys.stdin.isatty() and out.is_terminal):
        raise ConfigError(
            "needs a terminal to draw on; --once prints, `rachis status --json` is for machines", field="top"
        )
    asyncio.run(_top(options.admin_address(address), None if once else interval_s))


async def _top(address: str, interval_s: float | None) -> None:
    """interval_s: None prints once."""
    async with AsyncClient(address) as client:
        top = Top(client, address)
        await (top.print_once() if interval_s is None else top.run(interval_s))


class Top:
    """What was seen last, and the view of it."""

    def __init__(self, client: AsyncClient, address: str) -> None:
        self._client = client
        self._address = address
        self._view = View()
        self._service: dict[str, Any] = {}
        self._requests: Sequence[Row] = ()
        self._looked_s = 0.0
        # Of the request that is opened, once it has been asked for.
        self._stages: RenderableType = Text("")
        self._is_wanted = asyncio.Event()

    async def print_once(self) -> None:
        await self.look()
        for listing in Listing:
            view = View(listing)
            rows = view.ordered(self._rows(view))
            out.print(screen(view, self._service, rows, None, height=10_000))

    async def run(self, interval_s: float) -> None:
        """Raises what the first look does; later ones that fail are shown. Keys are heeded while the router hangs."""
        await self.look()
        news: asyncio.Queue[str] = asyncio.Queue()
        with keyboard(news), Live(console=out, screen=True, auto_refresh=False) as live:
            async with asyncio.TaskGroup() as group:
                looking = group.create_task(self._keep_looking(interval_s, lambda: news.put_nowait("")))
                while not self._view.is_over:
                    live.update(self._drawn(out.height), refresh=True)
                    self._press(await news.get())
                    while not news.empty():
                        self._press(news.get_nowait())
                looking.cancel()

    async def look(self) -> None:
        before, before_s = self._service.get("workers", ()), self._looked_s
        service = await ask(self._client, self._address, None)
        listed = await self._client.admin.ListRequests(
            admin.ListRequestsRequest(running=_MOST_REQUESTS, ended=_MOST_REQUESTS), timeout=TIMEOUT_S
        )
        if self._view.listing is Listing.REQUESTS and self._view.opened is not None:
            self._stages = await self._stages_of(self._view.opened)
        self._looked_s = monotonic_s()
        service["workers"] = with_rates(service["workers"], before, self._looked_s - before_s)
        self._service = {**service, "unlisted": listed.running_total - len(listed.running), "said": ""}
        self._requests = [request_row(view) for view in (*listed.running, *listed.ended)]

    async def _keep_looking(self, interval_s: float, on_seen: Callable[[], object]) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await self._is_wanted.wait()
            self._is_wanted.clear()
            try:
                await self.look()
            except grpc.aio.AioRpcError as error:
                self._service["said"] = f"the router does not answer: {error.details() or error.code().name}"
            on_seen()

    def _press(self, key: str) -> None:
        """An empty one: something was seen."""
        opened = self._view.opened
        self._view = self._view.after(key, self._view.ordered(self._rows(self._view)))
        if self._view.opened not in (None, opened):
            self._stages = Text("")
            self._is_wanted.set()

    def _drawn(self, height: int) -> RenderableType:
        view = self._view
        rows = view.ordered(self._rows(view))
        opened = self._opened(view, rows) if view.opened is not None else None
        return screen(view, self._service, rows, opened, height)

    def _opened(self, view: View, rows: Sequence[Row]) -> RenderableType:
        """A worker as it is, or the stages of a request."""
        if view.listing is Listing.REQUESTS:
            return self._stages
        row = next((row for row in rows if view.name_of(row) == view.opened), None)
        return Text(f"{view.opened} is gone") if row is None else details(row)

    async def _stages_of(self, request_id: str) -> RenderableType:
        try:
            told = await self._client.admin.GetTrace(admin.GetTraceRequest(request_id=request_id), timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            return Text(f"{request_id}: {error.details() or error.code().name}")
        return answer_view(trace_of(told))

    def _rows(self, view: View) -> Sequence[Row]:
        if view.listing is Listing.REQUESTS:
            return self._requests
        workers: Sequence[Row] = self._service["workers"]
        return workers


def request_row(view: admin.RequestView) -> Mapping[str, Any]:
    row: dict[str, Any] = MessageToDict(
        view, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return row
