"""`rachis logs` over a running service: what it shows, what it says where there is nothing, and that it ends."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from rachis.v1 import worker_pb2 as wire

from cluster_core.event_log import LogRules, logged
from command_line.logs import logs
from tests.fakes.cluster import Cluster


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
