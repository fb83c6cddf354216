"""`rachis serve` dies under a service on a Ray of its own: its workers and other routers go on, and the next one takes
the workers over. The tests share the service and come in order."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
from rachis import AsyncClient, Generated, token_prompt

from benchmarks.one_host_ray import OneHostRay, one_host_ray
from cluster_core.ports import hold_port
from tests.integration.conftest import until

pytestmark = pytest.mark.integration

PROMPT = [(5 * index) % 250 for index in range(200)]
SAMPLING: dict[str, Any] = {"temperature": 0.8, "seed": 7, "max_tokens": 1500, "ignore_eos": True}
NAME = "head-dies"


@dataclass(slots=True)
class Head:
    """The commands of a service with an embedded Redis. shared: settings of `serve` and `route`."""

    state: Path
    shared: dict[str, str]
    ray: OneHostRay
    router_port: int = field(default_factory=lambda: hold_port("127.0.0.1"))
    processes: list[asyncio.subprocess.Process] = field(default_factory=list)

    async def run(self, command: str, until_event: str, settings: dict[str, str]) -> dict[str, Any]:
        """What it says with that event. Its process is the last of `processes`."""
        arguments = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "command_line.main", command, "--json", *arguments,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "RACHIS_STATE_DIR": str(self.state)}, start_new_session=True,
        )  # fmt: skip
        self.processes.append(process)
        assert process.stdout is not None
        event: dict[str, Any] = {}
        while event.get("event") != until_event:
            event = json.loads(await process.stdout.readline())
        return event

    async def serve(self, **settings: str) -> asyncio.subprocess.Process:
        others = {key.replace("__", "."): value for key, value in settings.items()}
        own = {"ray.address": self.ray.address, "router.port": str(self.router_port)}
        await self.run("serve", "ready", {**self.shared, **own, **others})
        return self.processes[-1]

    async def second_router(self) -> str:
        place = json.loads((self.state / f"redis-{NAME}" / "place.json").read_text())
        url = f"redis://:{place['password']}@127.0.0.1:{place['port']}/0"
        settings = {**self.shared, "redis.url": url, "router.port": "0"}
        listening: str = (await self.run("route", "listening", settings))["address"]
        return listening


@pytest_asyncio.fixture(scope="module")
async def head(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Head]:
    shared = {
        "service.name": NAME,
        "placement.disaggregation": "always",
        "redis.host": "127.0.0.1",
        "gateway.port": "null",
    }
    async with one_host_ray(cpus=4) as ray:
        head = Head(tmp_path_factory.mktemp("state"), shared, ray)
        try:
            yield head
        finally:
            for process in head.processes:
                if process.returncode is None:
                    process.terminate()
                    await process.communicate()


@pytest_asyncio.fixture(scope="module")
async def second(head: Head) -> AsyncIterator[AsyncClient]:
    """A client of the second router, beside a first `rachis serve`."""
    await head.serve()
    async with AsyncClient(await head.second_router()) as client:
        await until(lambda: _is_served(client), "both workers are known to the second router")
        yield client


async def test_answers_of_another_router_outlive_it_and_the_next_one_takes_the_same_processes_over(
    head: Head, second: AsyncClient
) -> None:
    expected = (await _answer(second)).token_ids
    before = await _process_ids(second)

    streams = [asyncio.create_task(_answer(second)) for _ in range(4)]
    await until(lambda: _is_busy(second), "they are decoded")
    # Once it is killed they may be done at any time.
    assert not any(stream.done() for stream in streams)
    await _killed(head.processes[0])
    assert (await _answer(second, max_tokens=20)).token_ids == expected[:20], "new ones are served without it"

    await head.serve(service__leave_workers="true")

    assert [answer.token_ids for answer in await asyncio.gather(*streams)] == [expected] * 4
    assert await _process_ids(second) == before
    async with AsyncClient(f"127.0.0.1:{head.router_port}") as first:
        await until(lambda: _is_served(first), "both workers are known to the router of the next one")
        answer = await _answer(first, max_tokens=20)
        assert answer.token_ids == expected[:20]
        assert answer.completion.route.prefill_worker_id == "prefill-0"


async def test_one_that_is_to_leave_its_workers_ends_without_them(head: Head, second: AsyncClient) -> None:
    before = await _process_ids(second)
    last = head.processes[-1]
    last.terminate()
    await last.communicate()
    assert last.returncode == 0
    assert all(map(psutil.pid_exists, before.values()))
    assert len((await _answer(second, max_tokens=20)).token_ids) == 20


async def test_workers_of_other_settings_are_ended_and_those_that_nobody_keeps_end_by_themselves(
    head: Head, second: AsyncClient
) -> None:
    before = await _process_ids(second)
    process = await head.serve(service__orphan_s="2")
    await until(lambda: _is_served(second), "the second router knows those that came")
    after = await _process_ids(second)
    assert not set(before.values()) & set(after.values())
    assert not any(map(psutil.pid_exists, before.values()))
    await _killed(process)

    async def all_ended() -> bool:
        return not any(map(psutil.pid_exists, after.values()))

    await until(all_ended, "nobody keeps them")
    # Ray would start them again at once.
    await asyncio.sleep(3.0)
    below = psutil.Process(head.ray.pid).children(recursive=True)
    assert [each.name() for each in below if each.name().startswith(("ray::Prefill", "ray::Decode"))] == []


async def _answer(client: AsyncClient, **others: Any) -> Generated:
    return await client.generate(token_prompt(PROMPT), **{**SAMPLING, **others})


async def _process_ids(client: AsyncClient) -> dict[str, int]:
    return {view.registration.worker_id: view.registration.pid for view in await client.workers()}


async def _is_served(client: AsyncClient) -> bool:
    views = await client.workers()
    return len(views) == 2 and all(view.HasField("load") for view in views)


async def _is_busy(client: AsyncClient) -> bool:
    return any(view.load.running_requests == 4 for view in await client.workers())


async def _killed(process: asyncio.subprocess.Process) -> None:
    process.send_signal(signal.SIGKILL)
    await process.wait()
