"""The shipped alerts over a real service and a real Prometheus: quiet while all is well, firing when parts break.

One service takes all faults, one after the other. Prometheus looks every `SCRAPE_S`, and all durations of the rules
are divided by `HASTE`. What cannot be caused here, such as a full host:
tests/process/cluster_configs/test_alert_rules.py.
"""

import asyncio
import json
import os
import re
import signal
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
import redis
import yaml
from rachis import AsyncClient, Generated, token_prompt
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire

from cluster_core.heartbeat import LEAST_S
from cluster_core.ports import hold_port
from cluster_wire import registry
from control_plane.service import child_process
from tests.fakes.redis_server import RestartedRedis
from tests.integration import secured
from tests.integration.conftest import own_service, until
from tests.prometheus import binary, rule_groups

pytestmark = pytest.mark.integration

HASTE = 30
SCRAPE_S = 2
QUIET_S = 12
QUIET_REQUESTS = 12
CLIENTS = 24
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
# So small that a handful of clients is too much, and a decode worker with one request lets the others wait.
TIGHT: dict[str, Any] = {
    "router__max_in_flight_requests": 5,
    "router__max_queued_requests": 14,
    "router__queue_timeout_s": 3,
    "engine__max_running_requests": 1,
    "handoff__deadline_s": 0.3,
    "objectives__ttft_s": 0.5,
    "redis__worker_lease_s": 2,
    "index__max_staleness_s": 1,
    "index__silent_after_s": 1,
}
# Nothing has to last here: on a busy machine a look at the router that comes too late, or a lease of two seconds that
# is renewed too late, fires these.
BUSY = {"RachisRouterDown", "RachisWorkerLost", "RachisPoolBelowMinimum"}


class Alarms:
    """What a Prometheus says of one router. seen: every alert that has fired since it was last emptied."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.seen: set[str] = set()

    async def firing(self) -> set[str]:
        now = await asyncio.to_thread(self._read)
        self.seen |= now
        return now

    async def all_seen(self, *names: str) -> None:
        async def seen() -> bool:
            await self.firing()
            return set(names) <= self.seen

        try:
            await until(seen, "they fire")
        except AssertionError:
            pytest.fail(f"of {names} only {self.seen} have fired")

    async def over(self, *names: str) -> None:
        async def gone() -> bool:
            return not set(names) & await self.firing()

        await until(gone, f"{names} are over", timeout_s=120)

    async def is_up(self) -> bool:
        with suppress(OSError):
            await self.firing()
            return True
        return False

    def _read(self) -> set[str]:
        with urllib.request.urlopen(f"{self._url}/api/v1/alerts", timeout=5) as response:
            alerts = json.load(response)["data"]["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}


def hastened(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rules with every duration divided by `HASTE`; what has to last for a while fires at once."""
    text = re.sub(r"\[(\d+)m\]", lambda found: f"[{int(found[1]) * 60 // HASTE}s]", json.dumps(groups))
    changed: list[dict[str, Any]] = json.loads(text)
    for group in changed:
        for rule in group["rules"]:
            rule.pop("for", None)
    return changed


@asynccontextmanager
async def prometheus(folder: Path, metrics_address: str) -> AsyncIterator[Alarms]:
    """Looks at one router every `SCRAPE_S`, and waits as long for its answer: the machine may be busy."""
    config = {
        "global": dict.fromkeys(("scrape_interval", "scrape_timeout", "evaluation_interval"), f"{SCRAPE_S}s"),
        "rule_files": ["rules.yaml"],
        "scrape_configs": [{"job_name": "rachis", "static_configs": [{"targets": [metrics_address]}]}],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    (folder / "rules.yaml").write_text(yaml.safe_dump({"groups": hastened(rule_groups())}))
    where = f"127.0.0.1:{hold_port('127.0.0.1')}"
    command = [binary("prometheus"), f"--config.file={folder / 'prometheus.yaml'}"]
    command += [f"--storage.tsdb.path={folder / 'figures'}", f"--web.listen-address={where}"]
    process = child_process.start_bound(command, folder / "prometheus.log")
    try:
        alarms = Alarms(f"http://{where}")
        await until(alarms.is_up, "Prometheus answers")
        yield alarms
    finally:
        child_process.stop(process, 5)


@secured.for_open_services
async def test_faults_fire_their_alerts_and_a_quiet_service_none(tmp_path: Path) -> None:
    outside = RestartedRedis(tmp_path)
    try:
        async with own_service(tmp_path, redis__url=outside.url, **TIGHT) as (target, client):
            assert target.pid is not None
            # The first hand-off between two workers takes longer.
            await _generate(client, 1)
            status = await client.router_status()
            async with prometheus(tmp_path, status.metrics_address) as alarms:
                await _nothing_fires(client, alarms)
                await _too_many_requests(client, alarms)
                await _a_router_that_hangs(target.pid, alarms)
                await _redis_away(outside, alarms)
                await _a_worker_that_does_not_fit(outside.url, status.service_id, alarms)
                await _a_killed_worker(client, alarms)
    finally:
        outside.stop()


async def _nothing_fires(client: AsyncClient, alarms: Alarms) -> None:
    """Ordinary requests, one after the other, for longer than any rule looks back; but for those of an index.

    Where the machine is so slow that a request really is late, its alert is right.
    """
    until_s = asyncio.get_running_loop().time() + QUIET_S
    number, right = 0, set[str]()
    while number < QUIET_REQUESTS or asyncio.get_running_loop().time() < until_s:
        number += 1
        completion = (await _generate(client, number)).completion
        if completion.route.handoff != generation.HANDOFF_OUTCOME_PULLED:
            right |= {"RachisHandoffFailures", "RachisLeaseExpiries"}
        if completion.timings.ttft_ms > 1000 * TIGHT["objectives__ttft_s"]:
            right.add("RachisTtftObjectiveMissed")
        if completion.timings.ttft_ms + completion.timings.decode_ms > 1000 * LEAST_S:
            right.add("RachisWorkerHangs")
        assert await alarms.firing() <= right | BUSY
    await alarms.over(*right)
    alarms.seen.clear()


async def _too_many_requests(client: AsyncClient, alarms: Alarms) -> None:
    fired = ("RachisRouterOverloaded", "RachisQueueGrowing", "RachisTtftObjectiveMissed")
    late = ("RachisHandoffFailures", "RachisLeaseExpiries")
    async with _crowd(client):
        await alarms.all_seen(*fired, *late)
    await alarms.over(*fired, *late)
    assert alarms.seen - BUSY == {*fired, *late}


async def _a_router_that_hangs(pid: int, alarms: Alarms) -> None:
    alarms.seen.clear()
    os.kill(pid, signal.SIGSTOP)
    try:
        await alarms.all_seen("RachisRouterDown")
    finally:
        os.kill(pid, signal.SIGCONT)
    await alarms.over("RachisRouterDown")


async def _redis_away(outside: RestartedRedis, alarms: Alarms) -> None:
    alarms.seen.clear()
    outside.stop()
    await alarms.all_seen("RachisRegistryUnreachable", "RachisIndexStale")
    outside.start()
    # For a moment, until workers have told all over again; nothing has to last here.
    catching_up = {"RachisWorkerNotInSync", "RachisWorkerSilent"}
    await alarms.over("RachisRegistryUnreachable", "RachisIndexStale", *catching_up)
    assert alarms.seen - BUSY - catching_up == {"RachisRegistryUnreachable", "RachisIndexStale"}


async def _a_worker_that_does_not_fit(url: str, service_id: str, alarms: Alarms) -> None:
    """Registrations that no worker wrote: other versions, a wrong clock, a feed that tells nothing; an engine that
    hangs."""
    worker_id = "decode-99"
    record = wire.WorkerRegistration(
        worker_id=worker_id,
        generation=1 << 62,
        pool=wire.POOL_DECODE,
        state=wire.WORKER_STATE_READY,
        versions=wire.Versions(rachis="9.0.0", vllm="0.1.0", nixl="0.1.0"),
        clock_ahead_ms=60_000,
        claims_sequence=500,
        cacheable_requests=10,
    )
    hanging = wire.WorkerRegistration(
        worker_id="decode-98",
        generation=1 << 62,
        pool=wire.POOL_DECODE,
        state=wire.WORKER_STATE_READY,
        load=wire.WorkerLoad(stalled_s=12.0),
    )
    fired = (
        "RachisVersionSkew",
        "RachisClockSkew",
        "RachisWorkerHangs",
        "RachisWorkerSilent",
        "RachisWorkerNotInSync",
        "RachisIndexLagging",
    )
    with redis.Redis.from_url(url) as server:
        server.set(registry.snapshot_key(service_id, worker_id), b"no snapshot")
        for each in (record, hanging):
            server.set(registry.worker_key(service_id, each.worker_id), each.SerializeToString(), ex=60)
            server.sadd(registry.workers_key(service_id), each.worker_id)
        await alarms.all_seen(*fired, "RachisIndexDamagedBatches")
        server.srem(registry.workers_key(service_id), worker_id, hanging.worker_id)
    await alarms.over(*fired)


async def _a_killed_worker(client: AsyncClient, alarms: Alarms) -> None:
    """The only decode worker, each time it is started: what waits for it is told to come back."""
    killing = asyncio.create_task(_keep_killing(client, "decode-0"))
    # No more clients than slots: among many that are refused the few that fail would be no share of note.
    async with _crowd(client, TIGHT["router__max_in_flight_requests"]):
        await alarms.all_seen("RachisWorkerLost", "RachisPoolBelowMinimum", "RachisRequestsFailing")
        killing.cancel()
    await alarms.over("RachisWorkerLost", "RachisPoolBelowMinimum", "RachisRequestsFailing")


async def _keep_killing(client: AsyncClient, worker_id: str) -> None:
    """A machine may be so fast that one start is over before anybody is alarmed."""
    while True:
        for view in await client.workers():
            if view.registration.worker_id == worker_id and view.registration.state == wire.WORKER_STATE_READY:
                with suppress(ProcessLookupError):
                    os.kill(view.registration.pid, signal.SIGKILL)
        await asyncio.sleep(0.5)


@asynccontextmanager
async def _crowd(client: AsyncClient, clients: int = CLIENTS) -> AsyncIterator[None]:
    """Clients that ask again whatever they are answered, until the block ends."""

    async def ask(number: int) -> None:
        while True:
            with suppress(grpc.aio.AioRpcError):
                await _generate(client, number)
            number += clients
            await asyncio.sleep(0.05)

    asking = [asyncio.create_task(ask(number)) for number in range(clients)]
    try:
        yield
    finally:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


async def _generate(client: AsyncClient, number: int) -> Generated:
    return await client.generate(
        token_prompt([(number * index) % 250 for index in range(100)]), max_tokens=80, **GREEDY
    )
