"""What a service holds on to after many requests and sessions: memory, file descriptors, threads and tasks.

Router and workers are looked at once they have warmed up, and again at the end. Some clients leave before their answer,
and some sessions are taken back or just broken off.
"""

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
import psutil
from rachis import AsyncClient, token_prompt

from benchmarks.router_page import samples

TASKS = "rachis_router_tasks"
_CLIENTS = 16
# Each client takes a connection of its own after so many calls.
_CALLS_OF_A_CONNECTION = 50
_PROMPT_TOKENS = (8, 96)
_NEW_TOKENS = (1, 6)
_VOCABULARY = 250
_SAMPLING: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
_TIMEOUT_S = 60.0
_WARM_UP = 0.1
_SHARE_LEAVING = 0.1
_SETTLE_S = 10.0
_LOOKS = 5


@dataclass(frozen=True, slots=True)
class Held:
    """By one process. tasks: of the router's loop; None of workers, which tell none."""

    resident_bytes: int
    descriptors: int
    threads: int
    tasks: int | None = None


@dataclass(slots=True)
class SoakReport:
    """before, after: by process. statuses: of what was not answered, without those whose clients left."""

    requests: int = 0
    sessions: int = 0
    left: int = 0
    statuses: dict[str, int] = field(default_factory=dict)
    before: dict[str, Held] = field(default_factory=dict)
    after: dict[str, Held] = field(default_factory=dict)

    def growth(self) -> dict[str, dict[str, float]]:
        """How many times as much each process holds of everything."""
        return {
            name: {
                kind: getattr(after, kind) / getattr(self.before[name], kind)
                for kind in ("resident_bytes", "descriptors", "threads", "tasks")
                if getattr(after, kind) is not None
            }
            for name, after in self.after.items()
            if name in self.before
        }


async def measure(
    address: str, router_pid: int, requests: int, sessions: int, on_call: Callable[[], None] = lambda: None
) -> SoakReport:
    """Of a service whose router answers there."""
    report = SoakReport()
    calls = [False] * requests + [True] * sessions
    random.Random(0).shuffle(calls)
    warm_up = round(len(calls) * _WARM_UP)
    await _call_all(address, calls[:warm_up], report, on_call)
    report.before = await _held(address, router_pid)
    await _call_all(address, calls[warm_up:], report, on_call)
    report.after = await _held(address, router_pid)
    return report


async def _call_all(address: str, calls: list[bool], report: SoakReport, on_call: Callable[[], None]) -> None:
    """calls: whether each is a session."""
    rng, waiting = random.Random(len(calls)), iter(calls)

    async def client() -> None:
        while True:
            async with AsyncClient(address) as caller:
                for _ in range(_CALLS_OF_A_CONNECTION):
                    is_session = next(waiting, None)
                    if is_session is None:
                        return
                    await _call(caller, rng, report, is_session=is_session)
                    on_call()

    await asyncio.gather(*(client() for _ in range(_CLIENTS)))


async def _call(caller: AsyncClient, rng: random.Random, report: SoakReport, *, is_session: bool) -> None:
    prompt = [rng.randrange(_VOCABULARY) for _ in range(rng.randint(*_PROMPT_TOKENS))]
    sampling = {"max_tokens": rng.randint(*_NEW_TOKENS), **_SAMPLING}
    leaves = rng.random() < _SHARE_LEAVING
    report.left += leaves
    if is_session:
        report.sessions += 1
        asking = asyncio.create_task(_session(caller, prompt, sampling, ends=not leaves or rng.random() < 0.5))
    else:
        report.requests += 1
        asking = asyncio.create_task(_plain(caller, prompt, sampling))
    try:
        if leaves:
            await asyncio.wait({asking}, timeout=rng.uniform(0.0, 0.05))
            asking.cancel()
            with suppress(asyncio.CancelledError):
                await asking
        else:
            await asking
    except grpc.aio.AioRpcError as error:
        if not leaves:
            report.statuses[error.code().name] = report.statuses.get(error.code().name, 0) + 1


async def _plain(caller: AsyncClient, prompt: list[int], sampling: Mapping[str, Any]) -> None:
    await caller.generate(token_prompt(prompt), timeout_s=_TIMEOUT_S, **sampling)


async def _session(caller: AsyncClient, prompt: list[int], sampling: Mapping[str, Any], *, ends: bool) -> None:
    """Its prompt comes in two parts. One that does not end is left as it is."""
    half = len(prompt) // 2
    async with caller.session(timeout_s=_TIMEOUT_S, **sampling) as session:
        for piece in (prompt[:half], prompt[half:]):
            await session.append(piece)
        if ends:
            async for _ in session.finish():
                pass


async def _held(address: str, router_pid: int) -> dict[str, Held]:
    """The least of some looks: what a process needs for a moment is not held."""
    await asyncio.sleep(_SETTLE_S)
    looks = []
    for _ in range(_LOOKS):
        looks.append(await _looked_at(address, router_pid))
        await asyncio.sleep(1.0)
    return {name: _least([look[name] for look in looks]) for name in looks[0]}


def _least(looks: Sequence[Held]) -> Held:
    tasks = [look.tasks for look in looks if look.tasks is not None]
    return Held(
        resident_bytes=min(look.resident_bytes for look in looks),
        descriptors=min(look.descriptors for look in looks),
        threads=min(look.threads for look in looks),
        tasks=min(tasks) if tasks else None,
    )


async def _looked_at(address: str, router_pid: int) -> dict[str, Held]:
    async with AsyncClient(address) as client:
        pids = {view.registration.worker_id: view.registration.pid for view in await client.workers()}
    tasks = next(int(each.value) for each in await samples(address) if each.name == TASKS)
    held = {name: _of_process(pid) for name, pid in sorted(pids.items())}
    return {"router": _of_process(router_pid, tasks), **held}


def _of_process(pid: int, tasks: int | None = None) -> Held:
    process = psutil.Process(pid)
    return Held(process.memory_info().rss, process.num_fds(), process.num_threads(), tasks)
