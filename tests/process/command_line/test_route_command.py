"""`rachis route` around a router that is made up: how a signal ends it, and what nobody reads does not."""

import asyncio
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from command_line.route import route_command
from tests.fakes.broken_streams import BROKEN_STREAMS, broken_stream


class MadeUpRouter:
    """Is interrupted as soon as it is up."""

    address = "127.0.0.1:7000"
    admin_address = "127.0.0.1:7422"
    metrics = SimpleNamespace(url="http://127.0.0.1:7001/metrics")

    def __init__(self, did: list[str]) -> None:
        self._did = did

    async def start(self) -> None:
        self._did.append("started")
        asyncio.get_running_loop().call_later(0.01, os.kill, os.getpid(), signal.SIGTERM)

    async def stop(self) -> None:
        self._did.append("stopped")


@pytest.mark.parametrize("as_json", [True, False])
@pytest.mark.parametrize("how", BROKEN_STREAMS)
def test_a_router_whose_output_nobody_takes_routes_and_stops(
    how: str, as_json: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    did: list[str] = []

    def build(*_arguments: Any) -> MadeUpRouter:
        return MadeUpRouter(did)

    # The command is a composition root: it imports what it composes.
    monkeypatch.setattr("control_plane.server.composition.build_router", build)
    monkeypatch.setattr("control_plane.service.garbage.collect_rarely", lambda: did.append("collects rarely"))
    monkeypatch.setenv("RACHIS_STATE_DIR", str(tmp_path))
    with broken_stream(how) as stream, monkeypatch.context() as patched:
        patched.setattr("sys.stdout", stream)
        patched.setattr("sys.stderr", stream)
        told = ["service.name=chat", "redis.url=redis://127.0.0.1:1/0", "router.port=7000"]
        route_command(assignments=told, as_json=as_json)

    assert did == ["started", "collects rarely", "stopped"]
    assert [file.name for file in tmp_path.iterdir()] == ["router-route-7000.log"]
