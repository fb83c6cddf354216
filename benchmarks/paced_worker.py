"""A decode worker over a paced engine, in a process of its own: `python -m benchmarks.paced_worker ARGUMENTS.json`.

All but the engine is what a worker has: registration, gRPC server, service. It ends with who started it.
"""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from rachis.v1 import worker_pb2 as wire

from benchmarks.paced_engine import PacedEngine
from cluster_configs.loading import load
from cluster_core.clock import ClusterClock
from cluster_core.engine import Engine
from cluster_core.engine_reports import EngineInfo
from cluster_wire.redis_client import connect
from cluster_wire.secret import Secret, read_secret
from decode_worker.service import DecodeService
from worker_runtime.claim_feed import ClaimFeed
from worker_runtime.registration import Registration
from worker_runtime.service import WorkerServiceBase
from worker_runtime.worker_server import WorkerServer
from worker_runtime.worker_start import RegistryPlace, WorkerStart

_HOST = "127.0.0.1"
_LEASE_S = 30.0


@dataclass(frozen=True, slots=True)
class PacedWorker:
    redis_url: str
    service_id: str
    model: str
    tokenizer: str
    streams: int
    steps_per_s: float
    # Of the service's secret; None: there is none, and nothing is encrypted.
    secret_file: str | None = None

    @property
    def secret(self) -> Secret | None:
        return read_secret(Path(self.secret_file)) if self.secret_file is not None else None

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(self.model, self.tokenizer, 256, 1 << 20, 16, self.streams, "float32")


class _Ports:
    """See `worker_start.WorkerPorts`."""

    def __init__(self, worker: PacedWorker, record: wire.WorkerRegistration) -> None:
        self._worker = worker
        self._record = record

    async def take_generation(self, registration: Registration) -> int:
        return await registration.open()

    def make_engine(self, generation: int) -> Engine:
        return PacedEngine(self._worker.info, self._worker.steps_per_s)

    async def start_engine(self, engine: Engine, registration: Registration) -> EngineInfo:
        return await engine.start(lambda phase: None, lambda why: None)

    def make_server(self) -> WorkerServer:
        return WorkerServer(self._record, 64 << 20, _HOST, None, self._worker.secret)

    def make_service(
        self, engine: Engine, record: wire.WorkerRegistration, on_state: Callable[[], None], feed: ClaimFeed
    ) -> WorkerServiceBase:
        return DecodeService(engine, record, on_state, feed)

    def give_up(self, why: str) -> None:
        sys.exit(why)

    async def with_retries(self, write: Callable[[], Awaitable[object]]) -> None:
        await write()


async def serve(worker: PacedWorker) -> None:
    """Until the process is ended; says where it listens."""
    record = wire.WorkerRegistration(worker_id="decode-0", pool=wire.POOL_DECODE, state=wire.WORKER_STATE_STARTING)
    redis = lambda: connect(worker.redis_url, _LEASE_S)  # noqa: E731
    place = RegistryPlace(redis, worker.service_id, _LEASE_S, load().config.index, _LEASE_S, worker.secret)
    async with AsyncExitStack() as ends:
        await WorkerStart(place, record, ClusterClock(), _Ports(worker, record)).bring_up(ends)
        print(json.dumps({"address": record.address, "generation": record.generation}), flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(PacedWorker(**json.loads(Path(sys.argv[1]).read_text()))))
