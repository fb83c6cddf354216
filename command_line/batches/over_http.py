"""Sends a batch to a gateway, and writes down what comes."""

import os
from collections.abc import Sequence
from pathlib import Path

import httpx
from rachis.client import KEY_VARIABLE
from rachis.metadata_channel import key_metadata
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cluster_core.errors import ConfigError
from cluster_core.ids import new_request_id
from command_line.batches.batch_file import BatchAnswer, BatchRequest, answer_line
from command_line.batches.batch_run import UNREACHABLE, BatchRun, Reply, Send
from command_line.batches.batch_terms import BatchFigures, BatchLimits
from command_line.output import err


async def answer(
    requests: Sequence[BatchRequest],
    output_file: Path,
    whole_bytes: int,
    base_url: str,
    priority: int,
    limits: BatchLimits,
) -> BatchFigures:
    """Writes an answer of each to the output file. whole_bytes: of that file, which the answers come behind.

    Raises ConfigError for a URL that is none, and the client's InvalidInputError for a key that is none.
    """
    connections = httpx.Limits(max_connections=limits.concurrency)
    headers = dict(key_metadata(os.environ.get(KEY_VARIABLE, "")))
    columns = (TextColumn("answering"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with (
        output_file.open("ab") as output,
        Progress(*columns, console=err, disable=not err.is_terminal, transient=True) as progress,
    ):
        output.truncate(whole_bytes)
        task = progress.add_task("", total=len(requests))

        def done(request: BatchRequest, came: BatchAnswer) -> None:
            output.write(answer_line(request, came, f"batch_req_{new_request_id()}"))
            output.flush()
            progress.advance(task)

        async with _client(base_url, headers, connections) as client:
            # Without what a URL may say of who asks.
            place = client.base_url.netloc.decode()

            def say(sentence: str) -> None:
                err.print(f"{place} {sentence}", markup=False)

            return await BatchRun(sender(client, priority), limits, done, say=say).run(requests)


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
            return Reply(BatchAnswer(code=UNREACHABLE, message=f"{type(error).__name__}: {error}"))
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
