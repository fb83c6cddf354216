"""`rachis batch`: the requests of a file, as best effort, and their answers in another file."""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import httpx
import typer
from rachis.client import KEY_VARIABLE
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cluster_core.errors import ConfigError
from cluster_core.ids import new_request_id
from command_line import options
from command_line.batches.batch_file import BatchAnswer, BatchRequest, answer_line, answered, read_requests
from command_line.batches.batch_run import BatchFigures, BatchLimits, BatchRun, Reply, Send
from command_line.output import err, out, print_json
from command_line.output_files import check_writable
from control_plane.model.limits import MAX_PRIORITY

_MOST_AT_ONCE = 4096


def register(app: typer.Typer) -> None:
    app.command("batch")(batch_command)


def batch_command(
    input_file: Annotated[Path, typer.Argument(help="A request a line, in the format of OpenAI's batches.")],
    output_file: Annotated[Path, typer.Argument(help="Gets an answer a line; one that is there is gone on with.")],
    base_url: Annotated[str, typer.Option(help="Of a gateway.")] = "http://127.0.0.1:8000",
    concurrency: Annotated[int, typer.Option(min=1, max=_MOST_AT_ONCE, help="Requests at once.")] = 64,
    priority: Annotated[
        int,
        typer.Option(min=0, max=MAX_PRIORITY, help="Of requests that do not say; above 0 they take what others leave."),
    ] = 1,
    tries: Annotated[int, typer.Option(min=1, max=100, help="Of a request that the service fails at.")] = 3,
    window_s: Annotated[
        float, typer.Option(min=1, max=30 * 86_400, help="Time of the whole batch; what is left then has expired.")
    ] = 86_400,
    as_json: options.AsJson = False,
) -> None:
    """Have a file of requests answered by what others leave of a running service."""
    check_writable(output_file, "output_file")
    requests = _read(input_file)
    known, whole_bytes = _read_answers(output_file)
    left = [request for request in requests if request.custom_id not in known]
    try:
        figures = asyncio.run(
            _answer(left, output_file, whole_bytes, base_url, priority, BatchLimits(concurrency, tries, window_s))
        )
    except KeyboardInterrupt:
        err.print(f"the same command goes on with {output_file}")
        raise
    _tell(figures, len(requests), len(requests) - len(left), output_file, as_json=as_json)
    if figures.failed:
        raise typer.Exit(1)


def _read(file: Path) -> list[BatchRequest]:
    """Raises ConfigError, InvalidInputError."""
    try:
        with file.open(encoding="utf-8") as lines:
            return read_requests(lines)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot be read: {error}", field="input_file") from None


def _read_answers(file: Path) -> tuple[frozenset[str], int]:
    if not file.exists():
        return frozenset(), 0
    try:
        with file.open("rb") as lines:
            return answered(lines)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error}", field="output_file") from None


async def _answer(
    requests: Sequence[BatchRequest],
    output_file: Path,
    whole_bytes: int,
    base_url: str,
    priority: int,
    limits: BatchLimits,
) -> BatchFigures:
    """whole_bytes: of the output file, which the answers come behind."""
    connections = httpx.Limits(max_connections=limits.concurrency)
    key = os.environ.get(KEY_VARIABLE)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    columns = (TextColumn("answering"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with (
        output_file.open("ab") as output,
        Progress(*columns, console=err, disable=not err.is_terminal, transient=True) as progress,
    ):
        output.truncate(whole_bytes)
        task = progress.add_task("", total=len(requests))

        def done(request: BatchRequest, answer: BatchAnswer) -> None:
            output.write(answer_line(request, answer, f"batch_req_{new_request_id()}").encode())
            output.flush()
            progress.advance(task)

        async with _client(base_url, headers, connections) as client:
            return await BatchRun(sender(client, priority), limits, done).run(requests)


def _client(base_url: str, headers: dict[str, str], connections: httpx.Limits) -> httpx.AsyncClient:
    """Raises ConfigError. The service says how long a request may take, the batch how long all of them."""
    try:
        url = httpx.URL(base_url)
    except httpx.InvalidURL as error:
        raise ConfigError(f"is no URL: {error}", field="--base-url") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(f"must be http://host:port or https://host:port, got {base_url}", field="--base-url")
    return httpx.AsyncClient(base_url=url, headers=headers, limits=connections, timeout=httpx.Timeout(30.0, read=None))


def sender(client: httpx.AsyncClient, priority: int) -> Send:
    """One try over HTTP. priority: of requests that do not say."""

    async def send(request: BatchRequest) -> Reply:
        body = {"priority": priority, **request.body}
        try:
            response = await client.post(request.url, json=body)
        except httpx.HTTPError as error:
            return Reply(BatchAnswer(code="unreachable", message=f"{type(error).__name__}: {error}"))
        return Reply(
            BatchAnswer(response.status_code, _body(response), response.headers.get("x-request-id", "")),
            _retry_after_s(response.headers),
        )

    return send


def _body(response: httpx.Response) -> object:
    try:
        return response.json()
    except ValueError:
        return {"error": {"message": response.text, "type": "not_json", "code": response.status_code}}


def _retry_after_s(headers: httpx.Headers) -> float | None:
    for name, seconds in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        try:
            return float(headers[name]) * seconds
        except (KeyError, ValueError):
            continue
    return None


def _tell(figures: BatchFigures, requests: int, before: int, output_file: Path, *, as_json: bool) -> None:
    table = {
        "requests": requests,
        "answered": figures.answered + before,
        "answered_before": before,
        "failed": figures.failed,
        "expired": figures.expired,
        "tried_again": figures.tried_again,
    }
    if as_json:
        print_json(table)
        return
    out.print(f"{table['answered']} of {requests} answered, {figures.failed} failed; see {output_file}")
