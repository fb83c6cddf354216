"""`rachis batch`: the requests of a file, as best effort, and their answers in another file."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from cluster_core.errors import ConfigError
from command_line import options
from command_line.batches.batch_file import BatchRequest, answered, read_requests
from command_line.batches.batch_terms import BatchFigures, BatchLimits
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
    try_s: Annotated[
        float, typer.Option(min=1, max=86_400, help="Of one try; longer than router.request_timeout_s of the service.")
    ] = 900,
    window_s: Annotated[
        float, typer.Option(min=1, max=30 * 86_400, help="Time of the whole batch; what is left then has expired.")
    ] = 86_400,
    as_json: options.AsJson = False,
) -> None:
    """Have a file of requests answered by what others leave of a running service."""
    # Imported here: HTTP takes longer than everything else at the start of a command.
    from command_line.batches.over_http import answer

    check_writable(output_file, "output_file")
    requests = _read(input_file)
    known, whole_bytes = _read_answers(output_file)
    left = [request for request in requests if request.custom_id not in known]
    try:
        figures = asyncio.run(
            answer(left, output_file, whole_bytes, base_url, priority, BatchLimits(concurrency, tries, try_s, window_s))
        )
    except KeyboardInterrupt:
        err.print(f"the same command goes on with {output_file}", markup=False)
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
    out.print(f"{table['answered']} of {requests} answered, {figures.failed} failed; see {output_file}", markup=False)
