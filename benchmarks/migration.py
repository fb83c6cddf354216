"""What it costs that answers go on elsewhere, and how long they pause: on a real service with a second router.

without faults   the same requests in turn through a router that lets answers go on, and through one that lets them end
                 with their worker (`router.max_migrations` 0); both are routers of `rachis route`
kills            streams of long answers, decode workers killed one after the other, then the second router
drain            a decode worker is drained under 16 long answers, which are followed to their ends
rolling restart  of all workers, under short requests

Every answer of the last three is compared with what the service answered before.
"""

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import grpc
from rachis import AsyncClient, token_prompt
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire

from benchmarks.kept_command import KeptCommand
from cluster_core.clock import monotonic_s

ROUTER_KILLS = 3
_STREAMS = 16
_CASES = 16
_PROMPT_TOKENS = 200
_ANSWER_TOKENS = 300
_SHORT_TOKENS = 32
_SHORT_CLIENTS = 4
_DRAINED_ANSWERS = 16
_TIMEOUT_S = 600.0
_READY_TIMEOUT_S = 240.0
_GREEDY: Mapping[str, Any] = {"temperature": 0.0, "ignore_eos": True}
_VOCABULARY = 250

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Case:
    token_ids: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(slots=True)
class Asked:
    """What became of many requests. pauses_s: the longest of each answer that went on at another worker.
    resumed_pauses_s: of each that went on at another router, that one."""

    requests: int = 0
    failed: int = 0
    wrong: int = 0
    pauses_s: list[float] = field(default_factory=list)
    resumed_pauses_s: list[float] = field(default_factory=list)
    sentences: list[str] = field(default_factory=list)


@dataclass(slots=True)
class MigrationReport:
    """Ratios are of medians: with what answers need to go on, over without."""

    pause_p50_ms: float = 0.0
    pause_p99_ms: float = 0.0
    migrated: int = 0
    resume_pause_p50_ms: float = 0.0
    resume_pause_p99_ms: float = 0.0
    resumed: int = 0
    ttft_ratio_without_faults: float = 0.0
    tpot_ratio_without_faults: float = 0.0
    pairs: int = 0
    drain_s: float = 0.0
    drain_answers: int = 0
    drain_tokens: int = 0
    drain_failed: int = 0
    rolling_restart_s: float = 0.0
    rolling_requests: int = 0
    rolling_failed: int = 0
    failed: int = 0
    wrong: int = 0
    kills: int = 0
    sentences: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Size:
    """How much is asked. drain_tokens: of each answer under the drain."""

    pairs: int
    kills: int
    drain_tokens: int


async def measure(address: str, router: KeptCommand, baseline: KeptCommand, size: Size, say: Say) -> MigrationReport:
    """address: of the service's own router. router: the second one. baseline: the one that lets no answer go on, not
    started yet."""
    report = MigrationReport(pairs=size.pairs)
    rng = random.Random(0)
    async with AsyncClient(address) as first:
        say("asking for the answers before anything goes wrong")
        cases = await _cases(first, rng)
        say(f"{size.pairs} pairs of requests without faults")
        await baseline.start()
        await _without_faults((router.address, baseline.address), rng, size.pairs, report)
        await baseline.stop()
        say(f"killing decode workers, {size.kills} times, and the second router, {ROUTER_KILLS} times")
        async with _streams(address, cases) as asked:
            await _kill_decode_workers(first, size.kills)
        _add(report, asked)
        report.pause_p50_ms, report.pause_p99_ms, report.migrated = _pauses_ms(asked.pauses_s)
        async with _streams(f"{address},{router.address}", cases) as asked:
            await _kill_router(router)
        _add(report, asked)
        report.resume_pause_p50_ms, report.resume_pause_p99_ms, report.resumed = _pauses_ms(asked.resumed_pauses_s)
        report.kills = size.kills + ROUTER_KILLS
        say(f"draining a decode worker under {_DRAINED_ANSWERS} answers of {size.drain_tokens} tokens")
        await _drain(first, rng, size.drain_tokens, report)
        say("starting all workers again, one after the other")
        await _restart(first, address, cases, report)
    return report


async def _cases(client: AsyncClient, rng: random.Random) -> list[Case]:
    prompts = [_prompt(rng) for _ in range(_CASES)]
    answers = await asyncio.gather(*(_answer(client, prompt, _ANSWER_TOKENS) for prompt in prompts))
    return [Case(tuple(prompt), answer) for prompt, answer in zip(prompts, answers, strict=True)]


async def _without_faults(addresses: Sequence[str], rng: random.Random, pairs: int, report: MigrationReport) -> None:
    """Each pair asks both routers for prompts that nobody has cached, in an order that is drawn."""
    ttfts: dict[str, list[float]] = {address: [] for address in addresses}
    tpots: dict[str, list[float]] = {address: [] for address in addresses}
    left = iter(range(pairs))

    async def ask(clients: Mapping[str, AsyncClient]) -> None:
        for _ in left:
            for address in rng.sample(list(addresses), 2):
                began_s = monotonic_s()
                came_s = []
                async for _ in clients[address].stream(token_prompt(_prompt(rng)), max_tokens=_SHORT_TOKENS, **_GREEDY):
                    came_s.append(monotonic_s())
                ttfts[address].append(came_s[0] - began_s)
                tpots[address].append((came_s[-1] - came_s[0]) / (_SHORT_TOKENS - 1))

    async with AsyncClient(addresses[0]) as with_it, AsyncClient(addresses[1]) as without:
        clients = dict(zip(addresses, (with_it, without), strict=True))
        await asyncio.gather(*(ask(clients) for _ in range(_SHORT_CLIENTS)))
    report.ttft_ratio_without_faults = median(ttfts[addresses[0]]) / median(ttfts[addresses[1]])
    report.tpot_ratio_without_faults = median(tpots[addresses[0]]) / median(tpots[addresses[1]])


@asynccontextmanager
async def _streams(address: str, cases: Sequence[Case], streams: int = _STREAMS) -> AsyncIterator[Asked]:
    """So many answers are given at all times, until the block ends; those that have begun are followed to the end."""
    asked, is_over = Asked(), asyncio.Event()

    async def ask(number: int) -> None:
        rng = random.Random(number)
        async with AsyncClient(address) as client:
            while not is_over.is_set():
                await _follow(client, rng.choice(cases), asked)

    async with asyncio.TaskGroup() as tasks:
        for number in range(streams):
            tasks.create_task(ask(number))
        try:
            yield asked
        finally:
            is_over.set()


async def _follow(client: AsyncClient, case: Case, asked: Asked) -> None:
    asked.requests += 1
    tokens: list[int] = []
    last_s, pause_s, resumed_s, resumes = monotonic_s(), 0.0, 0.0, client.resumes
    completion = generation.Completion()
    try:
        pieces = client.stream(
            token_prompt(case.token_ids), timeout_s=_TIMEOUT_S, max_tokens=len(case.answer), **_GREEDY
        )
        async with aclosing(pieces) as stream:
            piece: Any
            async for piece in stream:
                if isinstance(piece, generation.Completion):
                    completion = piece
                    continue
                now_s = monotonic_s()
                if tokens:
                    pause_s = max(pause_s, now_s - last_s)
                if client.resumes > resumes:
                    resumed_s, resumes = max(resumed_s, now_s - last_s), client.resumes
                last_s = now_s
                tokens += piece.token_ids
    except grpc.aio.AioRpcError as error:
        asked.failed += 1
        asked.sentences.append(f"{error.code().name} after {len(tokens)} tokens: {error.details()}")
        asked.wrong += tuple(tokens) != case.answer[: len(tokens)]
        return
    asked.wrong += tuple(tokens) != case.answer
    if resumed_s:
        asked.resumed_pauses_s.append(resumed_s)
    elif completion.route.migrations:
        asked.pauses_s.append(pause_s)


async def _kill_decode_workers(client: AsyncClient, kills: int) -> None:
    """In turn, each once all are there again."""
    for number in range(kills):
        views = await _until_ready(client)
        victim = f"decode-{number % 2}"
        pid = next(view.registration.pid for view in views if view.registration.worker_id == victim)
        await asyncio.sleep(2.0)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    await _until_ready(client)


async def _kill_router(router: KeptCommand) -> None:
    for _ in range(ROUTER_KILLS):
        await asyncio.sleep(3.0)
        assert router.process is not None
        os.kill(router.process.pid, signal.SIGKILL)
        await router.killed()
        await asyncio.sleep(3.0)
        await router.start()


async def _until_ready(client: AsyncClient) -> Sequence[admin.WorkerView]:
    """All workers of both pools, as their routers know them. Raises TimeoutError."""
    async with asyncio.timeout(_READY_TIMEOUT_S):
        while True:
            await asyncio.sleep(1.0)
            pools = (await client.admin.GetPools(admin.GetPoolsRequest(), timeout=10)).pools
            views = await client.workers()
            ready = sum(view.registration.state == wire.WORKER_STATE_READY and view.HasField("load") for view in views)
            if ready == sum(pool.desired_workers for pool in pools) == sum(pool.ready_workers for pool in pools):
                return views


async def _drain(client: AsyncClient, rng: random.Random, tokens: int, report: MigrationReport) -> None:
    """Of the decode worker that has most of the answers. Each is asked for again afterwards, to compare."""
    prompts = [_prompt(rng) for _ in range(_DRAINED_ANSWERS)]
    began = [asyncio.Event() for _ in prompts]
    running = [
        asyncio.create_task(_answer(client, prompt, tokens, event))
        for prompt, event in zip(prompts, began, strict=True)
    ]
    await asyncio.gather(*(event.wait() for event in began))
    views = [view for view in await client.workers() if view.registration.pool == wire.POOL_DECODE]
    victim = max(views, key=lambda view: view.in_flight_requests).registration.worker_id
    began_s = monotonic_s()
    async for _ in client.admin.RemoveWorker(admin.RemoveWorkerRequest(worker_id=victim)):
        pass
    report.drain_s = monotonic_s() - began_s
    answers = await asyncio.gather(*running, return_exceptions=True)
    report.drain_answers, report.drain_tokens = len(prompts), tokens
    whole = [answer for answer in answers if not isinstance(answer, BaseException)]
    report.drain_failed = len(answers) - len(whole)
    report.sentences += tuple(repr(answer) for answer in answers if isinstance(answer, BaseException))
    report.failed += report.drain_failed
    report.wrong += sum(len(answer) != tokens for answer in whole)
    async for _ in client.admin.ScalePools(admin.ScalePoolsRequest(decode_workers=2)):
        pass


async def _restart(client: AsyncClient, address: str, cases: Sequence[Case], report: MigrationReport) -> None:
    async with _streams(address, cases) as asked:
        began_s = monotonic_s()
        async for _ in client.admin.RestartWorkers(admin.RestartWorkersRequest()):
            pass
        report.rolling_restart_s = monotonic_s() - began_s
    _add(report, asked)
    report.rolling_requests, report.rolling_failed = asked.requests, asked.failed


async def _answer(
    client: AsyncClient, prompt: Sequence[int], tokens: int, began: asyncio.Event | None = None
) -> tuple[int, ...]:
    answer: list[int] = []
    try:
        async for piece in client.stream(token_prompt(prompt), timeout_s=_TIMEOUT_S, max_tokens=tokens, **_GREEDY):
            if isinstance(piece, generation.CompletionDelta):
                answer += piece.token_ids
                # One token comes from the prefill worker.
                if began is not None and len(answer) > 1:
                    began.set()
    finally:
        if began is not None:
            began.set()
    return tuple(answer)


def _prompt(rng: random.Random) -> list[int]:
    return [rng.randrange(_VOCABULARY) for _ in range(_PROMPT_TOKENS)]


def _add(report: MigrationReport, asked: Asked) -> None:
    report.failed += asked.failed
    report.wrong += asked.wrong
    report.sentences += tuple(asked.sentences)


def _pauses_ms(pauses_s: Sequence[float]) -> tuple[float, float, int]:
    """P50, P99, and how many."""
    ordered = sorted(pauses_s) or [0.0]
    return median(ordered) * 1000, ordered[int(0.99 * (len(ordered) - 1))] * 1000, len(pauses_s)
