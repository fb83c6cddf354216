"""`rachis serve` around a service that is made up: what it says, and how a signal ends it."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import cast

import pytest
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import worker_pb2 as wire

from cluster_core.errors import ConfigError, StartError
from command_line.serve import StartService, serve, serve_command
from tests.fakes.broken_streams import BROKEN_STREAMS, broken_stream


class MadeUpGateways:
    async def first_url(self) -> str:
        return "http://127.0.0.1:8000"


class MadeUpService:
    """One prefill worker that serves, one decode worker that has not come up."""

    address = "[fd00::10]:7000"
    admin_address = "127.0.0.1:7422"
    service_id = "made-up"
    is_open = True

    def __init__(self) -> None:
        self.replaced = asyncio.Event()
        self.gateways: MadeUpGateways | None = None
        self.workers = [wire.WorkerRegistration(worker_id="prefill-0", address="[fd00::10]:1", pid=1, node="here")]

    def missing(self) -> list[admin.PoolWorker]:
        return [admin.PoolWorker(worker_id="decode-0", detail="no room on any node")]


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def starting(while_starting: Callable[[], Awaitable[None]] | None = None) -> tuple[StartService, list[bool]]:
    """A service that is interrupted as soon as it is up, and a list that has an entry once it was taken down."""

    @asynccontextmanager
    async def start(on_phase: Callable[[str, str], None]) -> AsyncIterator[MadeUpService]:
        on_phase("router", "starting")
        on_phase("router", "starting")
        try:
            if while_starting is not None:
                await while_starting()
            asyncio.get_running_loop().call_soon(interrupt)
            yield MadeUpService()
        finally:
            ended.append(True)

    ended: list[bool] = []
    return cast(StartService, start), ended


def served(start: StartService, *, as_json: bool) -> None:
    asyncio.run(serve("builtin", start, as_json=as_json))


def test_machines_read_each_phase_once_then_where_it_listens_and_who_is_missing_then_the_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    start, ended = starting()

    served(start, as_json=True)

    phase, ready, stopped = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert phase == {"event": "phase", "part": "router", "phase": "starting"}
    assert (ready["event"], ready["address"], ready["service_id"]) == ("ready", "[fd00::10]:7000", "made-up")
    assert ready["admin_address"] == "127.0.0.1:7422"
    assert ready["missing"] == {"decode-0": "no room on any node"} and ready["open"]
    assert (stopped["event"], stopped["served"], ended) == ("stopped", True, [True])


def test_people_read_who_serves_and_who_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    start, ended = starting()

    served(start, as_json=False)

    first, administration, worker, missing, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("serving builtin on [fd00::10]:7000 after ")
    assert administration == "  administration on 127.0.0.1:7422"
    assert worker.split() == ["prefill-0", "[fd00::10]:1", "process", "1", "on", "here"]
    assert missing.split(maxsplit=1) == ["decode-0", "not ready: no room on any node"]
    assert rest[0].startswith("  open: without keys whoever reaches it may do everything")
    assert rest[1:] == ["Ctrl-C stops it", "stopping", "stopped"]
    assert ended == [True]


@pytest.mark.parametrize("as_json", [True, False])
def test_a_service_whose_name_another_one_has_taken_ends_and_says_so(as_json: bool) -> None:
    @asynccontextmanager
    async def start(on_phase: Callable[[str, str], None]) -> AsyncIterator[MadeUpService]:
        service = MadeUpService()
        service.replaced.set()
        yield service
        ended.append(True)

    ended: list[bool] = []
    with pytest.raises(StartError, match=r"service\.name: another `rachis serve` has taken this service's name"):
        served(cast(StartService, start), as_json=as_json)
    assert ended == [True]


def test_a_signal_while_the_service_starts_takes_down_what_was_up(capsys: pytest.CaptureFixture[str]) -> None:
    async def never_up() -> None:
        interrupt()
        await asyncio.Event().wait()

    start, ended = starting(never_up)

    served(start, as_json=True)

    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"event": "stopped", "served": False}
    assert ended == [True]


def test_a_service_that_does_not_come_up_says_why() -> None:
    async def fail() -> None:
        raise StartError("no room")

    start, ended = starting(fail)

    with pytest.raises(StartError, match="no room"):
        served(start, as_json=True)
    assert ended == [True]


@pytest.mark.parametrize("as_json", [True, False])
@pytest.mark.parametrize("how", BROKEN_STREAMS)
def test_a_service_whose_output_nobody_takes_serves_and_is_taken_down(
    how: str, as_json: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, ended = starting()

    with broken_stream(how) as stream, monkeypatch.context() as patched:
        patched.setattr("sys.stdout", stream)
        patched.setattr("sys.stderr", stream)
        served(start, as_json=as_json)

    assert ended == [True]


@pytest.mark.parametrize("as_json", [True, False])
def test_where_http_is_served_is_said_once_it_is(capsys: pytest.CaptureFixture[str], as_json: bool) -> None:
    class Interrupting(MadeUpGateways):
        async def first_url(self) -> str:
            asyncio.get_running_loop().call_later(0.05, interrupt)
            return await super().first_url()

    @asynccontextmanager
    async def start(on_phase: Callable[[str, str], None]) -> AsyncIterator[MadeUpService]:
        service = MadeUpService()
        service.gateways = Interrupting()
        yield service

    served(cast(StartService, start), as_json=as_json)

    lines = capsys.readouterr().out.splitlines()
    said = json.dumps({"event": "http", "url": "http://127.0.0.1:8000"}) if as_json else "HTTP on http://127.0.0.1:8000"
    assert said in lines


def test_a_service_shares_its_port_with_nobody() -> None:
    given = ["router.share_port=true", "router.admin_port=1"]
    with pytest.raises(ConfigError, match="is set by `rachis route --processes` alone"):
        serve_command(assignments=given)
