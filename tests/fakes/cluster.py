"""A whole cluster in one process: the real router and the real workers' services on loopback, over fake engines.

Only three things are not real: the engines, the tokenizer (one token for each byte), and Redis, which knows what tests
register and nothing else.
"""

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import grpc
from rachis.conventions import channel_options
from rachis.v1 import admin_pb2_grpc, router_pb2_grpc, worker_pb2_grpc
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import router_pb2 as api
from rachis.v1 import worker_pb2 as wire

from cluster_configs.loading import load
from cluster_core.log_files import ReadLogs
from cluster_wire.members import MembersOnly
from cluster_wire.redis_client import RedisClient
from cluster_wire.secret import Secret, read_secret
from cluster_wire.worker_tls import MakeChannel, add_worker_port
from control_plane.intake.tokenization import Frame, Tokenizer, document_text
from control_plane.model.lifecycle import State
from control_plane.pools.actors import Actors
from control_plane.server.composition import ROUTER_TIMING, RouterPorts, RouterTiming, build_router
from control_plane.server.router_server import RouterParts, RouterServer
from decode_worker.service import DecodeService
from prefill_worker.service import PrefillService
from shared_worker.service import SharedService
from tests.fakes.engine import FakeEngine, fabric
from tests.fakes.grammar_compiler import FakeGrammarCompiler
from tests.fakes.registry import RegistryRedis
from tests.fakes.session_call import SessionCall
from worker_runtime.claim_feed import ClaimAudit
from worker_runtime.own_logs import no_logs
from worker_runtime.service import WorkerServiceBase

MODEL = wire.ModelInfo(
    name="fake", tokenizer="bytes", vocabulary_size=256, max_model_len=512, dtype="float32", max_adapters=2
)
PREFILL, DECODE, SHARED = wire.POOL_PREFILL, wire.POOL_DECODE, wire.POOL_SHARED
SERVICE = "svc-test"
# Of calls that are to expire at the router: long enough to get there on a busy machine, and for a session, to be where
# it is to expire.
CLIENT_DEADLINE_S = 1.0
SESSION_DEADLINE_S = 5.0
# Of a worker that has the service's own, or none.
OWN_SECRET = Secret(b"")
# How `until` looks: in each turn of the loop at first, for a second or more, and pure tests need no longer.
_EAGER_TURNS = 200_000
_LOOK_EVERY_S = 0.001

_POOLS: "dict[wire.Pool.ValueType, tuple[str, Callable[..., WorkerServiceBase]]]" = {
    PREFILL: ("prefill", partial(PrefillService, progress_interval_ms=0)),
    DECODE: ("decode", DecodeService),
    SHARED: ("shared", partial(SharedService, progress_interval_ms=0)),
}


async def until(holds: Callable[[], bool], *, timeout_s: float = 300.0) -> None:
    """Lets everything else run until it is so; bounded, for what never comes: a busy machine takes its time.

    What comes at once is seen in the turn of the loop that it comes in; what takes longer is no reason to keep a core.
    """
    turns = itertools.count()
    async with asyncio.timeout(timeout_s):
        while not holds():  # noqa: ASYNC110 - what is waited for sits in objects that know nothing of events
            await asyncio.sleep(0 if next(turns) < _EAGER_TURNS else _LOOK_EVERY_S)


class BytesTokenizer(Tokenizer):
    """One token for each byte of UTF-8."""

    async def load(self) -> None:
        pass

    async def token_ids(self, prompt: generation.PromptInput) -> list[int]:
        if prompt.text == "defect":
            raise ZeroDivisionError("a defect")
        if prompt.HasField("token_ids"):
            return list(prompt.token_ids.ids)
        return list((prompt.text or "".join(message.content for message in prompt.chat.messages)).encode())

    async def frame(self, prefix: generation.PromptInput, closing: generation.ChatMessages | None = None) -> Frame:
        """A chat ends every message with a new line; one that begins with `~` changes the first."""
        if not prefix.HasField("chat"):
            return Frame(await self.token_ids(prefix), [])
        turns = [message.content for message in closing.messages] if closing else []
        head = "\n".join(message.content for message in prefix.chat.messages)
        if turns and turns[0].startswith("~"):
            head = head.upper()
        return Frame(list(head.encode()), list("".join(f"\n{turn}" for turn in [*turns, ""]).encode()))

    async def piece(self, piece: api.SessionPiece) -> list[int]:
        if piece.HasField("token_ids"):
            return list(piece.token_ids.ids)
        if piece.text == "defect":
            raise ZeroDivisionError("a defect")
        return list((document_text(piece.document) if piece.HasField("document") else piece.text).encode())

    async def pieces(self, pieces: Sequence[api.SessionPiece]) -> list[int]:
        return [token for piece in pieces for token in await self.piece(piece)]


class FirstOfEquals(random.Random):
    """Tests know who is chosen among equals: the first by name."""

    def randrange(self, *_args: Any) -> int:
        return 0


@dataclass(slots=True)
class Worker:
    """One worker that serves; `record` is what the registry says of it."""

    record: wire.WorkerRegistration
    engine: FakeEngine
    server: grpc.aio.Server
    # What it answers of the logs of its host.
    logs: ReadLogs = no_logs

    @property
    def name(self) -> str:
        return self.record.worker_id

    async def crash(self) -> None:
        """It is gone without a word: calls to it fail, its registration stays until its lease ends."""
        await self.server.stop(None)

    def will_die(self) -> "asyncio.Task[None]":
        """Its engine dies once it has a request, before anything comes of it."""

        async def dies() -> None:
            await self.engine.held.wait()
            self.engine.die("of a test")

        self.engine.hold_before(0)
        return asyncio.create_task(dies())


class Cluster:
    """Made by `running_cluster`."""

    def __init__(self, router: RouterServer, registry: RegistryRedis, secret: Secret | None = None) -> None:
        self.secret = secret
        self.router = router
        self.workers: list[Worker] = []
        self.calls = 0
        self.registry = registry
        self.fabric = fabric()
        self._channel = grpc.aio.insecure_channel(router.address)
        self.api = router_pb2_grpc.RouterServiceStub(self._channel)
        # The same door, where administration is not apart.
        self.admin_channel = grpc.aio.insecure_channel(router.admin_address)
        self.admin = admin_pb2_grpc.AdminServiceStub(self.admin_channel)

    @property
    def channel(self) -> grpc.aio.Channel:
        return self._channel

    @property
    def outcomes(self) -> dict[State, int]:
        return dict(self.parts.router.outcomes)

    @property
    def parts(self) -> RouterParts:
        return self.router.parts

    async def add(
        self,
        pool: wire.Pool.ValueType,
        name: str = "",
        *,
        number: int = 1,
        model: wire.ModelInfo = MODEL,
        claim_feed: ClaimAudit | None = None,
        secret: Secret | None = OWN_SECRET,
        reached_at: Callable[[str], Awaitable[str]] | None = None,
        **engine: Any,
    ) -> Worker:
        """A worker joins, and the router has heard of it. reached_at: makes the address that it registers, of the one
        at which it listens."""
        prefix, service = _POOLS[pool]
        name = name or f"{prefix}-{sum(worker.record.pool == pool for worker in self.workers)}"
        fake = FakeEngine(name, self.fabric, **engine)
        record = wire.WorkerRegistration(
            worker_id=name,
            generation=number,
            pool=pool,
            state=wire.WORKER_STATE_READY,
            model=model,
            max_running_requests=64,
        )
        secret = self.secret if secret is OWN_SECRET else secret
        members = [MembersOnly(secret)] if secret is not None else []
        server = grpc.aio.server(interceptors=members, options=channel_options(64 << 20))
        worker = Worker(record, fake, server)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(
            service(
                fake, record, lambda: self.registry.write(record), claim_feed, logs=lambda query: worker.logs(query)
            ),
            server,
        )
        record.address = f"127.0.0.1:{add_worker_port(server, '127.0.0.1:0', secret)}"
        await server.start()
        if reached_at is not None:
            record.address = await reached_at(record.address)
        self.workers.append(worker)
        await self.register(record)
        return worker

    async def register(self, record: wire.WorkerRegistration) -> None:
        """The registry now says this of the worker; records are written whole, as workers do."""
        self.registry.write(record)
        await until(lambda: self._known(record.worker_id) == record.generation)

    async def unregister(self, worker: Worker) -> None:
        """It says that it leaves, and does."""
        if (member := self.router.membership.get(worker.name)) is not None:
            worker.record.state = wire.WORKER_STATE_DRAINING
            self.registry.write(worker.record)
            await until(lambda: member.registration.state == wire.WORKER_STATE_DRAINING)
        self.registry.remove(worker.name)
        await until(lambda: self._known(worker.name) is None)

    def call(
        self,
        text: str = "hello",
        *,
        timeout_s: float | None = None,
        request_id: str = "",
        model: str = "",
        cache_salt: str = "",
        priority: int = 0,
        **sampling: Any,
    ) -> Any:
        """A request on its way."""
        self.calls += 1
        request = api.GenerateRequest(
            prompt=generation.PromptInput(text=text),
            sampling=generation.SamplingParams(**{"temperature": 0.0, "max_tokens": 8, **sampling}),
            request_id=request_id,
            model=model,
            cache_salt=cache_salt,
            priority=priority,
        )
        return self.api.Generate(request, timeout=timeout_s)

    def session(self, *, timeout_s: float | None = None) -> SessionCall:
        """A session that is not open yet."""
        self.calls += 1
        return SessionCall(self.api.StreamGenerate(timeout=timeout_s))  # type: ignore[call-arg]

    async def generate(self, text: str = "hello", **options: Any) -> list[api.GenerateResponse]:
        return [response async for response in self.call(text, **options)]

    async def ends_with(self, outcomes: dict[State, int]) -> None:
        """These are the outcomes: a client may hear of an end before the router has counted it."""
        await until(lambda: sum(self.outcomes.values()) >= sum(outcomes.values()))
        assert self.outcomes == outcomes

    def idle(self) -> bool:
        """No request anywhere: neither counted by the router, nor in an engine that lives, nor as a lease there."""
        return not self.left()

    def left(self) -> dict[str, int]:
        """What is not idle, by its name."""
        members = self.router.membership.members()
        living = [worker.engine.status().load for worker in self.workers if not worker.engine.is_dead]
        counts = {
            "requests in flight": sum(member.in_flight_requests for member in members),
            "tokens in flight": sum(member.in_flight_tokens for member in members),
            "running requests": sum(load.running_requests for load in living),
            "leased hand-offs": sum(load.leased_handoffs for load in living),
            "blocks taken": sum(load.total_blocks - load.free_blocks for load in living),
            "calls without an outcome": self.calls - sum(self.outcomes.values()),
        }
        return {name: count for name, count in counts.items() if count}

    async def close(self) -> None:
        await self._channel.close(None)
        await self.admin_channel.close(None)
        await self.router.stop()
        for worker in self.workers:
            await worker.server.stop(None)
            await worker.engine.stop()

    def _known(self, name: str) -> int | None:
        member = self.router.membership.get(name)
        return member.registration.generation if member else None


async def _compiler(folder: str, vocabulary_size: int, memory_mib: int) -> FakeGrammarCompiler:
    return FakeGrammarCompiler()


@asynccontextmanager
async def running_cluster(
    actors: Actors | None = None,
    timing: RouterTiming = ROUTER_TIMING,
    tokenizer: type[Tokenizer] = BytesTokenizer,
    channel: MakeChannel | None = None,
    **flags: Any,
) -> AsyncIterator[Cluster]:
    """A router without workers; on the way out it must be idle, every request counted in one outcome. channel: to
    workers; None: as it is in production."""
    settings = {
        "router.port": 0,
        "router.drain_timeout_s": 2,
        "router.queue_timeout_s": 5,
        "redis.refresh_s": 0.001,
        "redis.worker_lease_s": 60,
        # Memory that is written to for nothing takes as long as some tests.
        "index.max_entries": 1024,
        "placement.disaggregation": "always",
        "streaming.progress_interval_ms": 0,
        **{key.replace("__", "."): value for key, value in flags.items()},
    }
    loaded = load(flags=settings)
    secret_file = loaded.config.security.secret_path
    secret = read_secret(Path(secret_file)) if secret_file is not None else None
    registry = RegistryRedis(SERVICE, secret)
    ports = RouterPorts(
        redis=lambda timeout_s: cast(RedisClient, registry),
        actors=actors,
        tokenizer=tokenizer,
        grammar_compiler=_compiler,
        rng=FirstOfEquals,
        channel=channel,
    )
    router = build_router(loaded, SERVICE, ports, timing)
    await router.start()
    cluster = Cluster(router, registry, secret)
    try:
        yield cluster
        try:
            await until(cluster.idle)
        except TimeoutError:
            raise AssertionError(f"not idle: {cluster.left()}") from None
        router.membership.check_invariants()
    finally:
        await cluster.close()


def named(cluster: Cluster, name: str) -> Worker:
    return next(worker for worker in cluster.workers if worker.name == name)
