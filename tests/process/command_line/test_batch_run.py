"""What a batch needs a real clock or a socket for: one try, where its service is frozen, and what a gateway is sent."""

import asyncio
from pathlib import Path

import pytest
from rachis import InvalidInputError

from command_line.batches.batch_file import BatchRequest
from command_line.batches.batch_terms import BatchFigures, BatchLimits
from command_line.batches.over_http import answer
from tests.pure.command_line.test_batch_run import World, status


def test_a_frozen_service_keeps_a_request_for_one_try_and_the_others_not_at_all() -> None:
    world = World(lambda name, tried: status(200), try_s=0.01)
    world.silent.add("a")
    figures = world.play("a", "b", "c")
    assert (figures.answered, figures.expired) == (2, 1)
    assert "did not answer in time" in world.answers["a"].message and figures.tried_again > 3


async def sent(output_file: Path) -> tuple[BatchFigures, list[bytes]]:
    """By a batch of one request, to a gateway that answers it, as lines of HTTP."""
    lines: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines.extend((await reader.readuntil(b"\r\n\r\n")).split(b"\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        await writer.drain()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as gateway:
        url = f"http://127.0.0.1:{gateway.sockets[0].getsockname()[1]}"
        limits = BatchLimits(concurrency=1, tries=1, try_s=30.0, window_s=30.0)
        figures = await answer([BatchRequest("a", "/v1/completions", {})], output_file, 0, url, 1, limits)
    return figures, lines


async def test_a_key_may_come_with_the_end_of_its_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As from a file of variables."""
    monkeypatch.setenv("RACHIS_API_KEY", "rk-secret\n")
    figures, lines = await sent(tmp_path / "answers.jsonl")
    assert figures == BatchFigures(answered=1)
    assert [line for line in lines if b"rk-" in line] == [b"authorization: Bearer rk-secret"]


async def test_what_is_no_key_is_refused_at_once_and_not_repeated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RACHIS_API_KEY", "rk-one\nrk-two")
    with pytest.raises(InvalidInputError, match="must be at most 4096 printable ASCII characters") as refused:
        await sent(tmp_path / "answers.jsonl")
    assert "rk-" not in str(refused.value) and not (tmp_path / "answers.jsonl").exists()
