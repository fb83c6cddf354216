"""`rachis top`: asks the router once in an interval, and draws what it says until somebody has seen enough."""

import asyncio
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import grpc
import typer
from google.protobuf.json_format import MessageToDict
from rachis import AsyncClient
from rachis.v1 import admin_pb2 as admin
from rich.console import Console, RenderableType
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
    asyncio.run(_top(options.running_address(address), None if once else interval_s))


async def _top(address: str, interval_s: float | None) -> None:
    """interval_s: None prints once."""
    async with AsyncClient(address) as client:
        top = Top(client, address)
        await (top.print_once() if interval_s is None else top.run(interval_s))


class Top:
    """One look after the other."""

    def __init__(self, client: AsyncClient, address: str) -> None:
        self._client = client
        self._address = address
        self._view = View()
        self._service: dict[str, Any] = {}
        self._requests: Sequence[Row] = ()
        self._looked_s = 0.0

    async def print_once(self) -> None:
        await self.look()
        for listing in Listing:
            view = View(listing)
            rows = view.ordered(self._rows(view))
            out.print(screen(view, self._service, rows, None, height=10_000))

    async def run(self, interval_s: float) -> None:
        """Raises what the first look does; later ones that fail are shown."""
        await self.look()
        keys: asyncio.Queue[str] = asyncio.Queue()
        with keyboard(keys), Live(console=out, screen=True, auto_refresh=False) as live:
            while not self._view.is_over:
                live.update(await self._drawn(out), refresh=True)
                try:
                    async with asyncio.timeout(interval_s):
                        key = await keys.get()
                except TimeoutError:
                    await self._look_again()
                else:
                    self._view = self._view.after(key, self._view.ordered(self._rows(self._view)))

    async def look(self) -> None:
        before, before_s = self._service.get("workers", ()), self._looked_s
        service = await ask(self._client, self._address, None)
        listed = await self._client.admin.ListRequests(
            admin.ListRequestsRequest(running=_MOST_REQUESTS, ended=_MOST_REQUESTS), timeout=TIMEOUT_S
        )
        self._looked_s = monotonic_s()
        service["workers"] = with_rates(service["workers"], before, self._looked_s - before_s)
        self._service = {**service, "running_total": listed.running_total, "said": ""}
        self._requests = [request_row(view) for view in (*listed.running, *listed.ended)]

    async def _look_again(self) -> None:
        try:
            await self.look()
        except grpc.aio.AioRpcError as error:
            self._service["said"] = f"the router does not answer: {error.details() or error.code().name}"

    async def _drawn(self, console: Console) -> RenderableType:
        view = self._view
        rows = view.ordered(self._rows(view))
        opened = await self._opened(view, rows) if view.opened is not None else None
        return screen(view, self._service, rows, opened, console.height)

    async def _opened(self, view: View, rows: Sequence[Row]) -> RenderableType:
        """A worker as it is, or the stages of a request."""
        if view.listing is Listing.WORKERS:
            row = next((row for row in rows if view.name_of(row) == view.opened), None)
            return Text(f"{view.opened} is gone") if row is None else details(row)
        try:
            told = await self._client.admin.GetTrace(
                admin.GetTraceRequest(request_id=view.opened or ""), timeout=TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            return Text(f"{view.opened}: {error.details() or error.code().name}")
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
