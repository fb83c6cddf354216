"""Workers that leave and start again under load: on real engines no request fails, and no token changes."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import generation_pb2 as generation

from benchmarks.direct_call import DirectWorker
from benchmarks.plain_engine import GENERATION, plain_engine
from cluster_configs.loading import LoadedConfig
from control_plane.client import RachisClient, token_prompt
from tests.fakes.redis_server import running_redis
from tests.integration.conftest import all_blocks_free, own_service, until

pytestmark = pytest.mark.integration

STREAMS = 8
PROMPTS = [[(step * index) % 250 for index in range(40 + 70 * step)] for step in range(1, STREAMS + 1)]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
PIECE_TOKENS = 100
PIECE_PAUSE_S = 0.15
PAUSE_S = 0.5
TWO_EACH = {
    "pools__prefill__workers": 2,
    "pools__decode__workers": 2,
    "pools__prefill__cpus_per_worker": 0.25,
    "pools__decode__cpus_per_worker": 0.25,
    "limits__session_grace_s": 0.2,
}


class Load:
    """Eight streams, half of them sessions, one request after the other; each answer is compared."""

    def __init__(self, client: RachisClient, expected: Sequence[list[int]]) -> None:
        self._client = client
        self._expected = expected
        self._stopped = False
        self.routes: list[generation.Route] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Every stream has had an answer before the block, and another one after it."""
        streams = [asyncio.create_task(self._stream(number)) for number in range(STREAMS)]
        try:
            await until(lambda: self._answered(STREAMS, streams), "every stream answers", timeout_s=60)
            yield
            answers = len(self.routes)
            await until(lambda: self._answered(answers + STREAMS, streams), "every stream answers again", timeout_s=60)
        finally:
            self._stopped = True
            await asyncio.gather(*streams)

    async def _answered(self, answers: int, streams: Sequence["asyncio.Task[None]"]) -> bool:
        for stream in streams:
            if stream.done():
                stream.result()
        return len(self.routes) >= answers

    async def _stream(self, number: int) -> None:
        while not self._stopped:
            tokens, route = await (self._session(number) if number % 2 else self._request(number))
            assert tokens == self._expected[number], f"stream {number}, {route}"
            self.routes.append(route)
            # Engines that start need some of this machine too.
            await asyncio.sleep(PAUSE_S)

    async def _request(self, number: int) -> tuple[list[int], generation.Route]:
        answered = await self._client.generate(token_prompt(PROMPTS[number]), **GREEDY)
        return list(answered.token_ids), answered.completion.route

    async def _session(self, number: int) -> tuple[list[int], generation.Route]:
        """Its prompt comes in pieces, slowly enough for its worker to be drained meanwhile."""
        prompt = PROMPTS[number]
        async with self._client.session(prompt[:20], **GREEDY) as session:
            for start in range(20, len(prompt), PIECE_TOKENS):
                await asyncio.sleep(PIECE_PAUSE_S)
                await session.append(prompt[start : start + PIECE_TOKENS])
            tokens = [token async for delta in session.finish() for token in delta.token_ids]
        return tokens, session.completion.route


@pytest.mark.timeout(500)  # seven starts of an engine
async def test_a_drain_and_a_rolling_restart_under_load_lose_nothing(tmp_path: Path, loaded: LoadedConfig) -> None:
    async with plain_engine(loaded.config) as (address, _):
        plain = DirectWorker(address, GENERATION)
        expected = [list((await plain.decode(prompt, GREEDY)).token_ids) for prompt in PROMPTS]
        await plain.close()
    with running_redis(tmp_path) as redis_url:
        of_this_name = {"service__name": "chat", "redis__url": redis_url}
        async with own_service(tmp_path, **TWO_EACH, **of_this_name) as (_, client):
            await _lose_nothing(client, expected)
            await _have_a_second_router(redis_url, expected)


async def _lose_nothing(client: RachisClient, expected: Sequence[list[int]]) -> None:
    load = Load(client, expected)
    async with load.running():
        await _followed(client.admin.RemoveWorker(admin.RemoveWorkerRequest(worker_id="prefill-1")))
        assert await _sizes(client) == [(1, 1), (2, 2)]
        before = await _generations(client)
        await _followed(client.admin.RestartWorkers(admin.RestartWorkersRequest()))
    after = await _generations(client)
    assert after.keys() == before.keys() == {"prefill-0", "decode-0", "decode-1"}
    assert all(after[name] > before[name] for name in before)
    pools = (await client.admin.GetPools(admin.GetPoolsRequest())).pools
    assert [pool.lost_workers for pool in pools] == [0, 0]
    outcomes = (await client.router_status()).outcomes
    assert sum(outcomes.values()) == outcomes["finished"] == len(load.routes)
    assert {route.decode_worker_id for route in load.routes} == {"decode-0", "decode-1"}
    await until(lambda: all_blocks_free(client), "all blocks free")


async def _have_a_second_router(redis_url: str, expected: Sequence[list[int]]) -> None:
    """It finds the workers by itself, answers as the first one does, and its end touches nobody."""
    settings = ["--set", "service.name=chat", "--set", f"redis.url={redis_url}", "--set", "router.port=0"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "command_line.main", "route", "--json", *settings, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    listening = json.loads(await process.stdout.readline())
    async with RachisClient(listening["address"]) as client:
        await until(lambda: _knows_workers(client), "the second router knows the workers", timeout_s=20)
        answered = await client.generate(token_prompt(PROMPTS[0]), **GREEDY)
    assert list(answered.token_ids) == expected[0]
    process.terminate()
    output, _ = await process.communicate()
    assert (process.returncode, json.loads(output.splitlines()[-1])) == (0, {"event": "stopped"})


async def _knows_workers(client: RachisClient) -> bool:
    return len(await client.workers()) == 3


async def _followed(events: Any) -> None:
    async for _ in events:
        pass


async def _sizes(client: RachisClient) -> list[tuple[int, int]]:
    pools = (await client.admin.GetPools(admin.GetPoolsRequest())).pools
    return [(pool.desired_workers, pool.ready_workers) for pool in pools]


async def _generations(client: RachisClient) -> dict[str, int]:
    return {view.registration.worker_id: view.registration.generation for view in await client.workers()}
