"""Gateways beside a router: started, looked after, ended. Stand-ins of a few lines for what is in the processes."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from cluster_configs.schema import GatewaySection, WebSocketSection
from cluster_core.event_log import LogRules
from control_plane.service.gateways import GatewayLogs, Gateways
from control_plane.service.kept_processes import Pauses
from tests.fakes.cluster import until

_SAYS = """
import json, sys, time
arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
print("no event", flush=True)
print(json.dumps({"event": "listening", "url": f"http://{arguments['--host']}:{arguments['--port']}"}), flush=True)
time.sleep(600)
"""
_FAILS = "import sys; sys.exit('the port is taken')"


_SHORT = Pauses(first_s=0.01, longest_s=0.04)


@asynccontextmanager
async def running(folder: Path, code: str, pauses: Pauses = _SHORT, **section: Any) -> AsyncIterator[Gateways]:
    command = (sys.executable, "-c", code)
    made = Gateways(GatewaySection(**section), "127.0.0.1:7421", GatewayLogs(folder, "svc-1"), command, pauses=pauses)
    made.start()
    try:
        yield made
    finally:
        await made.stop()
        assert not any(psutil.pid_exists(pid) for pid in made.processes.pids)


async def eventually(holds: Callable[[], bool]) -> None:
    await until(holds, timeout_s=60)


async def test_its_address_is_known_once_it_listens(tmp_path: Path) -> None:
    async with running(tmp_path / "logs", _SAYS, port=8123, host="127.0.0.9") as gateways:
        assert await gateways.first_url() == "http://127.0.0.9:8123"
        assert len(gateways.processes.pids) == 1


async def test_it_is_told_its_section_and_where_redis_is_behind_its_back(tmp_path: Path) -> None:
    """A password has no place among a process's arguments."""
    told = tmp_path / "told"
    code = f"import sys; open({str(told)!r}, 'w').write(sys.stdin.readline() + ' '.join(sys.argv[1:]))\n{_SAYS}"
    section = GatewaySection(port=8123, websocket=WebSocketSection(idle_timeout_s=7))
    made = Gateways(
        section,
        "127.0.0.1:7421",
        GatewayLogs(tmp_path, "svc-1", LogRules("INFO", "json")),
        (sys.executable, "-c", code),
        redis_url="redis://:secret@r:1/0",
    )
    made.start()
    await made.first_url()
    await made.stop()
    redis_url, arguments = told.read_text().splitlines()
    assert redis_url == "redis://:secret@r:1/0"
    assert "secret" not in arguments
    assert "--redis - --set gateway.websocket.max_connections=1024" in arguments
    assert "--set gateway.websocket.idle_timeout_s=7.0" in arguments
    assert "--set gateway.stored_responses.max_responses=10000" in arguments
    own = f"--log-file {tmp_path / 'gateway-0.log'} --service svc-1 --set log_level=INFO --set log_format=json"
    assert arguments.startswith(own)


async def test_a_key_of_its_front_is_in_its_environment_and_not_among_its_arguments(tmp_path: Path) -> None:
    told = tmp_path / "told"
    says = f"open({str(told)!r}, 'w').write(' '.join([os.environ.get('VLLM_API_KEY', ''), *sys.argv[1:]]))"
    options = ("--api-key", "k3y", "--enable-auto-tool-choice")
    async with running(tmp_path / "logs", f"import os, sys; {says}\n{_SAYS}", options=options) as gateways:
        await gateways.first_url()
    key, *arguments = told.read_text().split()
    assert key == "k3y"
    assert "k3y" not in arguments and "--api-key" not in arguments
    assert arguments[-1] == "--enable-auto-tool-choice"


async def test_several_share_a_port(tmp_path: Path) -> None:
    async with running(tmp_path, _SAYS, port=0, processes=3) as gateways:
        await gateways.processes.all_up()
        url = await gateways.first_url()
        assert gateways.processes.starts == 3
        assert int(url.rpartition(":")[2]) > 0
        assert sorted(await asyncio.to_thread(os.listdir, tmp_path)) == [f"gateway-{number}.err" for number in range(3)]


async def test_one_that_is_killed_is_started_again(tmp_path: Path) -> None:
    async with running(tmp_path, _SAYS) as gateways:
        await gateways.first_url()
        (pid,) = gateways.processes.pids
        os.kill(pid, signal.SIGKILL)
        await eventually(lambda: gateways.processes.starts == 2 and gateways.processes.pids != [pid])


async def test_one_that_cannot_start_is_tried_later_each_time_and_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(tmp_path, _FAILS) as gateways:
        listening = asyncio.create_task(gateways.first_url())
        await eventually(lambda: gateways.processes.starts >= 4)
        assert not listening.done()
        listening.cancel()
    assert (tmp_path / "gateway-0.err").read_text().startswith("the port is taken\n" * 3)
    pauses = [record.args[4] for record in caplog.records if isinstance(record.args, tuple)]
    assert pauses[:4] == [0.01, 0.02, 0.04, 0.04][: len(pauses)]


async def test_one_that_cannot_even_be_started_is_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = Gateways(
        GatewaySection(port=8123), "127.0.0.1:7421", GatewayLogs(tmp_path, ""), ("/nowhere/at/all",), pauses=_SHORT
    )
    made.start()
    try:
        await eventually(lambda: caplog.text.count("gateway 0 cannot be started") >= 3)
    finally:
        await made.stop()
    assert not made.processes.pids


async def test_they_end_while_one_pauses(tmp_path: Path) -> None:
    async with asyncio.timeout(60), running(tmp_path, _FAILS, Pauses(first_s=600.0)) as gateways:
        await eventually(lambda: gateways.processes.starts == 1)


async def test_a_file_of_errors_that_has_grown_long_is_kept_once_when_its_gateway_is_started_again(
    tmp_path: Path,
) -> None:
    log = tmp_path / "gateway-0.err"
    with log.open("wb") as long:
        long.truncate((16 << 20) + 1)
    async with running(tmp_path, _FAILS, port=8123):
        await eventually(lambda: log.exists() and "the port is taken" in log.read_text())
    assert (tmp_path / "gateway-0.err.1").stat().st_size == (16 << 20) + 1
