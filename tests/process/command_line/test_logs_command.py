"""`rachis logs` over a running service: what it shows, what it says where there is nothing, and that it ends."""

import asyncio
import json
import logging
from itertools import chain, repeat
from pathlib import Path
from typing import Any
from unittest import mock
from unittest.mock import AsyncMock

import grpc
import psutil
import pytest
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import worker_pb2 as wire

from cluster_core.errors import PermissionDeniedError, UnavailableError
from cluster_core.event_log import LogRules, logged
from command_line.logs import logs
from command_line.options import admin_address, state_file
from control_plane.fleet.service_logs import ServiceLogs
from control_plane.service.state import ServiceState
from tests.fakes.cluster import Cluster, running_cluster, until


@pytest.fixture
def kept(tmp_path: Path) -> Any:
    """The router has a log of its own while it runs."""
    with logged("svc-test", "router", LogRules("INFO", "text"), tmp_path / "router.log"):
        yield


async def shown(cluster: Cluster, capsys: pytest.CaptureFixture[str], **options: Any) -> list[str]:
    query = wire.LogQuery(**options.pop("query", {}))
    capsys.readouterr()
    await logs(cluster.router.address, query, **{"follow_s": 0.0, "as_json": False, **options})
    return capsys.readouterr().out.splitlines()


@pytest.mark.usefixtures("kept")
async def test_events_of_a_request_are_shown_a_line_each(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    await cluster.generate(request_id="ask-1")
    await cluster.generate(request_id="ask-2")
    (line,) = await shown(cluster, capsys, query={"request_id": "ask-1", "level": "INFO"})
    assert "INFO    router control_plane.server.router_service: request finished [request ask-1, trace " in line


@pytest.mark.usefixtures("kept")
async def test_for_machines_it_is_one_object(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    await cluster.generate(request_id="ask-1")
    (line,) = await shown(cluster, capsys, query={"request_id": "ask-1"}, as_json=True)
    told = json.loads(line)
    assert told["missing"] == []
    assert told["events"][-1]["message"] == "request finished"
    assert isinstance(told["events"][-1]["unix_ms"], int)


async def test_where_nothing_is_found_a_sentence_says_so(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert await shown(cluster, capsys, query={"request_id": "ask-7", "level": "ERROR"}) == [
        "nothing of request ask-7 at ERROR or above is in the logs; processes write what is at `log_level` or above"
    ]


@pytest.mark.usefixtures("kept")
async def test_following_shows_each_event_once_and_ends_by_itself(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    logging.getLogger("control_plane.a_part").error("once [bold]and as it stands[/bold]")
    lines = await shown(cluster, capsys, query={"level": "ERROR"}, follow_s=2.5)
    # What another test has left in this process is told by asyncio, at any time.
    own = [line for line in lines if " control_plane.a_part: " in line]
    assert [line.partition(": ")[2] for line in own] == ["once [bold]and as it stands[/bold]"]


async def test_following_goes_on_while_the_router_does_not_answer_and_says_so(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    said = ""

    def is_said(sentence: str) -> bool:
        nonlocal said
        said += " ".join(capsys.readouterr().err.split()) + " "
        return sentence in said

    answers = chain([admin.GetLogsResponse(), UnavailableError("it is not there")], repeat(admin.GetLogsResponse()))
    # A router that fails in one call and answers the others has no port.
    with mock.patch.object(ServiceLogs, "read", AsyncMock(side_effect=answers)):
        following = asyncio.create_task(logs(cluster.router.address, wire.LogQuery(), follow_s=60.0, as_json=True))
        await until(lambda: is_said("the router does not answer: it is not there") or following.done())
        await until(lambda: is_said("the router answers again") or following.done())
        assert not following.done()
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def test_following_ends_where_asking_again_is_of_no_use(cluster: Cluster) -> None:
    refused = AsyncMock(side_effect=[admin.GetLogsResponse(), PermissionDeniedError("not any more")])
    # Keys are not taken back in a running router that has none.
    with mock.patch.object(ServiceLogs, "read", refused), pytest.raises(grpc.aio.AioRpcError, match="not any more"):
        await logs(cluster.router.address, wire.LogQuery(), follow_s=60.0, as_json=True)


async def test_where_administration_is_apart_logs_are_read_at_its_door(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RACHIS_STATE_DIR", str(tmp_path))
    process = psutil.Process()
    with logged("svc-test", "router", LogRules("INFO", "text"), tmp_path / "router.log"):
        async with running_cluster(router__admin_port=0) as cluster:
            doors = (cluster.router.address, cluster.router.admin_address)
            state_file().claim(ServiceState("svc-1", *doors, process.pid, process.create_time()))
            logging.getLogger("control_plane.a_part").error("it happened")
            await logs(admin_address(None), wire.LogQuery(level="ERROR"), follow_s=0.0, as_json=False)
            assert "control_plane.a_part: it happened" in capsys.readouterr().out
            with pytest.raises(grpc.aio.AioRpcError, match=r"router\.admin_host and router\.admin_port"):
                await logs(cluster.router.address, wire.LogQuery(), follow_s=0.0, as_json=False)
