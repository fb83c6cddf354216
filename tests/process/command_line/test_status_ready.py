"""`rachis status --ready`: good for whoever takes requests, and for nobody else."""

import asyncio
import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest

from command_line.status.overview import status
from command_line.status.ready import ready
from control_plane.service.state import ServiceState, StateFile
from tests.command import rachis
from tests.fakes.cluster import DECODE, Cluster


class Gateway(BaseHTTPRequestHandler):
    """Takes requests while it is told to."""

    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *_args: object) -> None:
        """Says nothing."""


@pytest.fixture
def gateway_url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Gateway) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def noted(folder: Path, address: str) -> StateFile:
    """The file of a service that is this process; it starts while it has no address."""
    file = StateFile(folder)
    process = psutil.Process(os.getpid())
    file.claim(ServiceState("svc", address, address, process.pid, process.create_time()))
    return file


async def test_a_service_is_ready_once_it_takes_requests_and_not_when_it_merely_answers(
    empty: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = noted(tmp_path, empty.router.admin_address)
    assert await status(None, file, as_json=True) == 0, "it answers"
    assert await ready(None, file, as_json=False) == 1
    assert "or has no worker" in capsys.readouterr().out

    await empty.add(DECODE)
    async with asyncio.timeout(60):
        while await ready(None, file, as_json=True):  # noqa: ASYNC110 - the command itself is what is tried
            await asyncio.sleep(0)
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["ready"] and told["address"] == empty.router.admin_address
    assert await ready(empty.router.address, StateFile(tmp_path / "none"), as_json=False) == 0


async def test_what_starts_or_is_not_there_is_not_ready(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert await ready(None, StateFile(tmp_path), as_json=False) == 1
    assert await ready(None, noted(tmp_path, ""), as_json=False) == 1
    assert await ready("127.0.0.1:1", StateFile(tmp_path), as_json=False) == 1
    none, starting, gone = capsys.readouterr().out.splitlines()
    assert "no service runs here" in none and "is starting" in starting and "does not answer" in gone


async def test_a_gateway_is_asked_by_its_url(
    gateway_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nobody = StateFile(tmp_path)
    assert await ready(gateway_url, nobody, as_json=False) == 0
    # What the stand-in answers from here on.
    monkeypatch.setattr(Gateway, "status", 503)
    assert await ready(f"{gateway_url}/", nobody, as_json=False) == 1
    assert "503" in capsys.readouterr().out
    assert await ready("http://127.0.0.1:1", nobody, as_json=False) == 1


def test_readiness_is_asked_alone() -> None:
    refused = rachis("status", "--ready", "--tiers")
    assert refused.exit_code != 0 and "without --tiers" in str(refused.exception)
