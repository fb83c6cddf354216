"""What happens when parts of a running service die, or are asked to end. The tests share a service and come in order:
the last one ends it."""

import asyncio
import functools
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc
import psutil
import pytest
import pytest_asyncio
from rachis import AsyncClient, token_prompt
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire

from control_plane.service.state import StateFile, processes_of
from tests.integration.conftest import all_blocks_free, came_back, until, worker_of
from worker_runtime.preloaded_python import JOB_VARIABLE

pytestmark = pytest.mark.integration

PROMPT = [(5 * index) % 250 for index in range(200)]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}


@dataclass(frozen=True, slots=True)
class Served:
    """`rachis serve` as somebody types it, but for the port and where it writes its state. Nothing of it is forked."""

    process: asyncio.subprocess.Process
    service_id: str
    state: StateFile
    client: AsyncClient


@pytest_asyncio.fixture(scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    folder = tmp_path_factory.mktemp("state")
    environment = {name: value for name, value in os.environ.items() if name != JOB_VARIABLE}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "command_line.main", "serve", "--json", "--set", "router.port=0",
        "--set", "gateway.port=null",
        "--set", "placement.disaggregation=always",
        stdout=asyncio.subprocess.PIPE, env={**environment, "RACHIS_STATE_DIR": str(folder)},
    )  # fmt: skip
    assert process.stdout is not None
    try:
        ready: dict[str, Any] = {}
        while ready.get("event") != "ready":
            ready = json.loads(await process.stdout.readline())
        async with AsyncClient(ready["address"]) as client:
            yield Served(process, ready["service_id"], StateFile(folder), client)
    finally:
        if process.returncode is None:
            process.terminate()
            await process.communicate()


async def test_a_prefill_worker_killed_while_it_prefills_does_not_lose_the_request(served: Served) -> None:
    client = served.client
    expected = await client.generate(token_prompt(PROMPT), **GREEDY)
    prompt = token_prompt([(17 * index) % 250 for index in range(3000)])
    running = asyncio.create_task(client.generate(prompt, **GREEDY))
    await until(lambda: _has_in_flight(client, "prefill-0"), "prefill-0 has the request")
    pid, before = await worker_of(client, "prefill-0")
    os.kill(pid, signal.SIGKILL)
    answered = await running
    assert len(answered.token_ids) == GREEDY["max_tokens"]
    assert answered.completion.route.prefill_worker_id in ("", "prefill-0")
    await came_back(client, "prefill-0", before)
    again = await client.generate(token_prompt(PROMPT), **GREEDY)
    assert again.token_ids == expected.token_ids
    assert again.completion.route.handoff == generation.HANDOFF_OUTCOME_PULLED
    await until(lambda: all_blocks_free(client), "all blocks free")


async def test_a_worker_whose_process_is_asked_to_end_ends_what_it_runs_and_is_started_again(served: Served) -> None:
    client = served.client
    long = {**GREEDY, "max_tokens": 3000}
    running = asyncio.create_task(client.generate(token_prompt(PROMPT), **long))
    await until(lambda: _has_in_flight(client, "decode-0"), "decode-0 has the request")
    pid, before = await worker_of(client, "decode-0")
    os.kill(pid, signal.SIGTERM)
    await until(lambda: _is_draining(client, "decode-0"), "decode-0 drains")
    assert psutil.pid_exists(pid) and not running.done()
    assert len((await running).token_ids) == long["max_tokens"]
    await came_back(client, "decode-0", before)
    assert not psutil.pid_exists(pid)


async def test_a_killed_embedded_redis_comes_back_and_workers_register_again(served: Served) -> None:
    client = served.client
    servers = [child for child in psutil.Process(served.process.pid).children() if "redis-server" in child.name()]
    assert len(servers) == 1
    servers[0].kill()
    answered = await client.generate(token_prompt(PROMPT), **GREEDY)
    assert len(answered.token_ids) == GREEDY["max_tokens"]
    await until(functools.partial(_registry_found, client), "the router reads the registry again")
    again = await client.generate(token_prompt(PROMPT), **GREEDY)
    assert again.completion.route.handoff == generation.HANDOFF_OUTCOME_PULLED


async def test_a_service_that_is_told_to_stop_ends_cleanly_and_leaves_no_process(served: Served) -> None:
    assert processes_of(served.service_id)
    served.process.send_signal(signal.SIGTERM)
    output, _ = await served.process.communicate()
    assert served.process.returncode == 0
    assert json.loads(output.splitlines()[-1])["event"] == "stopped"
    assert processes_of(served.service_id) == []
    assert served.state.read() is None


async def _is_draining(client: AsyncClient, worker_id: str) -> bool:
    records = [view.registration for view in await client.workers()]
    return any(each.worker_id == worker_id and each.state == wire.WORKER_STATE_DRAINING for each in records)


async def _has_in_flight(client: AsyncClient, worker_id: str) -> bool:
    return any(view.in_flight_requests for view in await client.workers() if view.registration.worker_id == worker_id)


async def _registry_found(client: AsyncClient) -> bool:
    with suppress(grpc.aio.AioRpcError):
        return (await client.router_status()).registry_connected
    return False
