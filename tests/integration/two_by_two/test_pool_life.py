"""Workers that leave and start again under load: on real engines no request fails, and no token changes.

The answers to compare with are those of the service before; that they are plain vLLM's: `test_service`.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from rachis import AsyncClient, token_prompt
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import generation_pb2 as generation

from tests.integration.conftest import all_blocks_free, until
from tests.integration.two_by_two.conftest import TwoByTwo, lost

pytestmark = [
    pytest.mark.integration,
    pytest.mark.leaves_less,
]

STREAMS = 4
PROMPTS = [[(step * index) % 250 for index in range(40 + 70 * step)] for step in range(1, STREAMS + 1)]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
PIECE_TOKENS = 100
PIECE_PAUSE_S = 0.15
PAUSE_S = 1.0


class Load:
    """Four streams, half of them sessions, one request after the other; each answer is compared."""

    def __init__(self, client: AsyncClient, expected: Sequence[list[int]]) -> None:
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


async def test_a_drain_and_a_rolling_restart_under_load_lose_nothing(two_by_two: TwoByTwo) -> None:
    answers = [await two_by_two.client.generate(token_prompt(prompt), **GREEDY) for prompt in PROMPTS]
    expected = [list(answer.token_ids) for answer in answers]
    await _lose_nothing(two_by_two.client, expected)
    # A router that comes later finds the workers that are left, and its end touches nobody.
    async with two_by_two.another_router() as client:
        answered = await client.generate(token_prompt(PROMPTS[0]), **GREEDY)
        assert list(answered.token_ids) == expected[0]
    assert await _sizes(two_by_two.client) == [(1, 1), (2, 2)]


async def _lose_nothing(client: AsyncClient, expected: Sequence[list[int]]) -> None:
    load, outcomes_before, lost_before = Load(client, expected), await _outcomes(client), await lost(client)
    async with load.running(), _processes_seen(client) as processes:
        await _followed(client.admin.RemoveWorker(admin.RemoveWorkerRequest(worker_id="prefill-1")))
        assert await _sizes(client) == [(1, 1), (2, 2)]
        before = await _generations(client)
        await _followed(client.admin.RestartWorkers(admin.RestartWorkersRequest()))
    after = await _generations(client)
    assert after.keys() == before.keys() == {"prefill-0", "decode-0", "decode-1"}
    assert all(after[name] > before[name] for name in before)
    # Its old process and its new one: nobody's ended without being told to.
    assert {name: len(processes[name]) for name in before} == dict.fromkeys(before, 2)
    assert await lost(client) == lost_before
    assert await _outcomes(client) - outcomes_before == {"finished": len(load.routes)}
    assert {route.decode_worker_id for route in load.routes} == {"decode-0", "decode-1"}
    await until(lambda: all_blocks_free(client), "all blocks free")


async def _followed(events: Any) -> None:
    async for _ in events:
        pass


async def _sizes(client: AsyncClient) -> list[tuple[int, int]]:
    pools = (await client.admin.GetPools(admin.GetPoolsRequest())).pools
    return [(pool.desired_workers, pool.ready_workers) for pool in pools]


async def _outcomes(client: AsyncClient) -> Counter[str]:
    return Counter((await client.router_status()).outcomes)


@asynccontextmanager
async def _processes_seen(client: AsyncClient) -> AsyncIterator[dict[str, set[int]]]:
    """By name of a worker, the processes that it has had during the block."""
    seen: dict[str, set[int]] = {}

    async def look() -> None:
        while True:
            for view in await client.workers():
                seen.setdefault(view.registration.worker_id, set()).add(view.registration.pid)
            await asyncio.sleep(PAUSE_S)

    looking = asyncio.create_task(look())
    try:
        yield seen
    finally:
        looking.cancel()
        with suppress(asyncio.CancelledError):
            await looking


async def _generations(client: AsyncClient) -> dict[str, int]:
    return {view.registration.worker_id: view.registration.generation for view in await client.workers()}
