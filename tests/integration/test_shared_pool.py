"""A service whose workers do both, on real engines: answers are plain vLLM's, and none is lost with a worker. Each
engine has a process of its own."""

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
import pytest_asyncio
from rachis import AsyncClient, token_prompt
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire

from benchmarks import identity
from benchmarks.direct_call import DirectWorker
from benchmarks.plain_engine import GENERATION, plain_engine
from cluster_configs.loading import load
from control_plane.intake.tokenization import Tokenizer
from tests.integration.conftest import all_blocks_free, came_back, keys_of, own_service, until, worker_of

pytestmark = [pytest.mark.integration, pytest.mark.leaves_less]

SHARED: dict[str, Any] = {
    "pools__prefill__workers": 0,
    "pools__decode__workers": 0,
    "pools__shared__workers": 2,
    "pools__shared__cpus_per_worker": 0.25,
    "placement__disaggregation": "conditional",
    "objectives__tpot_s": 1.0,
    "limits__session_grace_s": 0.2,
    "engine__own_process": True,
}
CASES = 16
STREAMS = 4
ROUNDS = 5
PROMPTS = [[random.Random(seed).randrange(250) for _ in range(60 + 90 * seed)] for seed in range(STREAMS)]
LONG: dict[str, Any] = {"temperature": 0.0, "max_tokens": 600, "ignore_eos": True}
PIECE_TOKENS = 50

Answer = tuple[list[int], generation.Route]
Ending = Callable[[AsyncClient, str], contextlib.AbstractAsyncContextManager[None]]


@pytest_asyncio.fixture(scope="module")
async def client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AsyncClient]:
    async with own_service(tmp_path_factory.mktemp("shared-pool"), **SHARED) as (_, client):
        yield client


async def test_tokens_are_plain_vllms_whole_in_sessions_and_when_a_worker_dies_or_drains(client: AsyncClient) -> None:
    config = load(flags=keys_of(SHARED)).config
    tokenizer = Tokenizer(config.model.resolved_path)
    await tokenizer.load()
    async with plain_engine(config) as (address, model):
        plain = DirectWorker(address, GENERATION)
        cases = identity.make_cases(CASES, 11, model.vocabulary_size, model.max_model_len, tokenizer.encode)
        report = await identity.compare(cases, client, plain, 4, lambda: None, exact=True)
        expected = [list((await plain.decode(prompt, LONG)).token_ids) for prompt in PROMPTS]
        await plain.close()
    assert (report.divergences, report.identical) == ([], CASES)
    assert await _both_are_ready(client)

    # Half are whole, and half are sessions, which are bound to a decode worker at the first token.
    routes = _routes(await _answers(client), expected)
    assert [bool(route.prefill_worker_id) for route in routes] == [False, True] * (STREAMS // 2)

    rounds = await _rounds_until_some_move(client, expected, _killed)
    rounds += await _rounds_until_some_move(client, expected, _removed)
    outcomes = (await client.router_status()).outcomes
    assert outcomes == {"finished": CASES + (1 + rounds) * STREAMS}
    await until(lambda: all_blocks_free(client), "all blocks free")


async def _rounds_until_some_move(client: AsyncClient, expected: Sequence[list[int]], ended: Ending) -> int:
    """How often all answers were asked for. On a busy machine what is known of a worker may be so old that its answers
    have ended before it does: nobody moves then."""
    for rounds in range(1, ROUNDS + 1):
        async with _under_way(client) as (answers, busy), ended(client, busy):
            moved = await _moved(answers, expected)
        # One that had come there from a worker that was late ends there while that is still not used.
        if moved - {busy}:
            return rounds
    raise AssertionError("none has left a worker that ended")


@contextlib.asynccontextmanager
async def _killed(client: AsyncClient, worker_id: str) -> AsyncIterator[None]:
    """And started again in the end."""
    pid, generation_before = await worker_of(client, worker_id)
    os.kill(pid, signal.SIGKILL)
    yield
    await came_back(client, worker_id, generation_before)


@contextlib.asynccontextmanager
async def _removed(client: AsyncClient, worker_id: str) -> AsyncIterator[None]:
    """It drains first; another one is started in the end."""
    async for _ in client.admin.RemoveWorker(admin.RemoveWorkerRequest(worker_id=worker_id)):
        pass
    yield
    async for _ in client.admin.ScalePools(admin.ScalePoolsRequest(shared_workers=2)):
        pass


async def _both_are_ready(client: AsyncClient) -> bool:
    return await _pools(client) == [(wire.POOL_SHARED, 2, 2)]


@contextlib.asynccontextmanager
async def _under_way(client: AsyncClient) -> "AsyncIterator[tuple[asyncio.Future[list[Answer]], str]]":
    """All answers, and a worker that decodes some of them; placement may have all where their prefixes are."""
    answers = asyncio.ensure_future(_answers(client))

    async def busiest() -> str | None:
        runs = {view.registration.worker_id: view.load.running_requests for view in await client.workers()}
        return max(runs, key=runs.__getitem__) if sum(runs.values()) >= STREAMS or answers.done() else None

    try:
        yield answers, await until(busiest, "all of them run, or have ended unseen")
    finally:
        answers.cancel()


async def _answers(client: AsyncClient) -> list[Answer]:
    return await asyncio.gather(*(_answer(client, number) for number in range(STREAMS)))


async def _answer(client: AsyncClient, number: int) -> Answer:
    prompt = PROMPTS[number]
    if number % 2 == 0:
        answered = await client.generate(token_prompt(prompt), **LONG)
        return list(answered.token_ids), answered.completion.route
    async with client.session(prompt[:20], **LONG) as session:
        for start in range(20, len(prompt), PIECE_TOKENS):
            await session.append(prompt[start : start + PIECE_TOKENS])
        tokens = [token async for delta in session.finish() for token in delta.token_ids]
    return tokens, session.completion.route


async def _moved(answers: "asyncio.Future[list[Answer]]", expected: Sequence[list[int]]) -> set[str]:
    """Where those have ended that went on elsewhere."""
    return {route.decode_worker_id for route in _routes(await answers, expected) if route.migrations}


def _routes(answers: Sequence[Answer], expected: Sequence[list[int]]) -> list[generation.Route]:
    assert [tokens for tokens, _ in answers] == list(expected)
    return [route for _, route in answers]


async def _pools(client: AsyncClient) -> list[tuple[int, int, int]]:
    pools = (await client.admin.GetPools(admin.GetPoolsRequest())).pools
    return [(pool.pool, pool.desired_workers, pool.ready_workers) for pool in pools]
