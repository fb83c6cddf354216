"""A whole cluster in one process: the real router and the real workers' services on loopback, over fake engines.

Only three things are not real: the engines, the tokenizer (one token for each byte), and Redis, which knows what tests
register and nothing else.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import grpc
import pytest
from google.rpc.error_details_pb2 import BadRequest
from google.rpc.status_pb2 import Status
from rachis.redis_client import RedisClient
from rachis.v1 import admin_pb2_grpc, router_pb2_grpc, worker_pb2_grpc
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import router_pb2 as api
from rachis.v1 import worker_pb2 as wire
from rachis.wire import channel_options, next_message

from cluster_configs.loading import load
from cluster_core.engine_jobs import SamplingSpec
from control_plane.intake.tokenization import Frame, Tokenizer, document_text
from control_plane.model.lifecycle import State
from control_plane.pools.life import Actors
from control_plane.server.composition import ROUTER_TIMING, RouterPorts, RouterTiming, build_router
from control_plane.server.router_server import RouterParts, RouterServer
from decode_worker.service import DecodeService
from prefill_worker.service import PrefillService
from tests.fakes.engine import FakeEngine, expected_text
from tests.fakes.registry import RegistryRedis
from worker_runtime.claim_feed import ClaimAudit
from worker_runtime.service import WorkerServiceBase

MODEL = wire.ModelInfo(name="fake", tokenizer="bytes", vocabulary_size=256, max_model_len=512, dtype="float32")
PREFILL, DECODE = wire.POOL_PREFILL, wire.POOL_DECODE
HELLO = tuple(b"hello")
SERVICE = "svc-test"


_POOLS: "dict[wire.Pool.ValueType, tuple[str, Callable[..., WorkerServiceBase]]]" = {
    PREFILL: ("prefill", partial(PrefillService, progress_interval_ms=0)),
    DECODE: ("decode", DecodeService),
}


async def until(holds: Callable[[], bool], *, timeout_s: float = 5.0) -> None:
    """Lets everything else run until it is so; bounded."""
    async with asyncio.timeout(timeout_s):
        while not holds():  # noqa: ASYNC110 - what is waited for sits in objects that know nothing of events
            await asyncio.sleep(0)


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

    @property
    def name(self) -> str:
        return self.record.worker_id

    async def crash(self) -> None:
        """It is gone without a word: calls to it fail, its registration stays until its lease ends."""
        await self.server.stop(None)


class SessionCall:
    """A client's session, message by message. Every event but progress is read in turn; `progress` is the latest."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.progress = generation.SessionProgress()
        self.progress_events = 0

    async def open(self, prefix: str | None = "hello", mode: str = "APPEND", **values: Any) -> api.SessionAccepted:
        """Sends `open` and waits until the session is accepted. `values` are fields of `open` or of its sampling."""
        await self.send(open=session_open(prefix, mode, **values))
        return (await self.event("accepted")).accepted

    async def send(self, **event: Any) -> None:
        await self.call.write(api.StreamGenerateRequest(**event))

    async def append(self, text: str) -> None:
        await self.send(append=api.SessionAppend(piece=api.SessionPiece(text=text)))

    async def update(self, revision: int, *texts: str) -> None:
        context = [api.SessionPiece(text=text) for text in texts]
        await self.send(update=api.SessionUpdate(revision=revision, context=context))

    async def finish(self, closing: str | None = None) -> None:
        text = None if closing is None else generation.PromptInput(text=closing)
        await self.send(finish=api.SessionFinish(closing=text))

    async def next_event(self) -> api.StreamGenerateResponse | None:
        """The next event that is no progress; None at the end."""
        while (response := await next_message(self.call)) is not None:
            if not response.HasField("progress"):
                break
            self._note(response.progress)
        event: api.StreamGenerateResponse | None = response
        return event

    async def event(self, kind: str) -> api.StreamGenerateResponse:
        event = await self.next_event()
        assert event is not None, "the session has ended"
        assert event.WhichOneof("event") == kind, event
        return event

    async def refused(self) -> tuple[str, str, int]:
        """Status, field and number of the message that was refused."""
        refused = (await self.event("refused")).refused
        assert refused.message.startswith(refused.field)
        return refused.status, refused.field, refused.message_number

    async def progressed(self, holds: Callable[[generation.SessionProgress], bool]) -> generation.SessionProgress:
        """Reads progress until it is as described; nothing else may come meanwhile."""
        while not holds(self.progress):
            response = await next_message(self.call)
            assert response is not None and response.HasField("progress"), response
            self._note(response.progress)
        return self.progress

    async def answer(self) -> list[api.StreamGenerateResponse]:
        """Everything up to the end of the stream, progress aside."""
        events = []
        while (event := await self.next_event()) is not None:
            events.append(event)
        return events

    async def failure(self) -> grpc.aio.AioRpcError:
        return await failure(self._events())

    def _note(self, progress: generation.SessionProgress) -> None:
        self.progress = progress
        self.progress_events += 1

    async def _events(self) -> AsyncIterator[api.StreamGenerateResponse]:
        while (event := await self.next_event()) is not None:
            yield event


class Cluster:
    """Made by `running_cluster`."""

    def __init__(self, router: RouterServer, registry: RegistryRedis) -> None:
        self.router = router
        self.workers: list[Worker] = []
        self.calls = 0
        self.registry = registry
        self._fabric: dict[str, FakeEngine] = {}
        self._channel = grpc.aio.insecure_channel(router.address)
        self.api = router_pb2_grpc.RouterServiceStub(self._channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(self._channel)

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
        claim_feed: ClaimAudit | None = None,
        **engine: Any,
    ) -> Worker:
        """A worker joins, and the router has heard of it."""
        prefix, service = _POOLS[pool]
        name = name or f"{prefix}-{sum(worker.record.pool == pool for worker in self.workers)}"
        fake = FakeEngine(name, self._fabric, **engine)
        record = wire.WorkerRegistration(
            worker_id=name,
            generation=number,
            pool=pool,
            state=wire.WORKER_STATE_READY,
            model=MODEL,
            max_running_requests=64,
        )
        server = grpc.aio.server(options=channel_options(64 << 20))
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(
            service(fake, record, lambda: self.registry.write(record), claim_feed), server
        )
        record.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        worker = Worker(record, fake, server)
        self.workers.append(worker)
        await self.register(record)
        return worker

    async def register(self, record: wire.WorkerRegistration) -> None:
        """The registry now says this of the worker; records are written whole, as workers do."""
        self.registry.write(record)
        await until(lambda: self._known(record.worker_id) == record.generation)

    async def unregister(self, worker: Worker) -> None:
        self.registry.remove(worker.name)
        await until(lambda: self._known(worker.name) is None)

    def call(
        self,
        text: str = "hello",
        *,
        timeout_s: float | None = None,
        request_id: str = "",
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

    def idle(self) -> bool:
        """No request anywhere: neither counted by the router, nor in an engine that lives, nor as a lease."""
        members = self.router.membership.members()
        loads = [worker.engine.status().load for worker in self.workers]
        return (
            all(member.in_flight_requests == member.in_flight_tokens == 0 for member in members)
            and all(load.leased_handoffs == load.running_requests == 0 for load in loads)
            and all(load.free_blocks == load.total_blocks for load in loads)
            and sum(self.outcomes.values()) == self.calls
        )

    async def close(self) -> None:
        await self._channel.close(None)
        await self.router.stop()
        for worker in self.workers:
            await worker.server.stop(None)

    def _known(self, name: str) -> int | None:
        member = self.router.membership.get(name)
        return member.registration.generation if member else None


@asynccontextmanager
async def running_cluster(
    actors: Actors | None = None, timing: RouterTiming = ROUTER_TIMING, **flags: Any
) -> AsyncIterator[Cluster]:
    """A router without workers; on the way out it must be idle, every request counted in one outcome."""
    registry = RegistryRedis(SERVICE)
    settings = {
        "router.port": 0,
        "router.drain_timeout_s": 2,
        "router.queue_timeout_s": 5,
        "redis.refresh_s": 0.001,
        "redis.worker_lease_s": 60,
        "placement.disaggregation": "always",
        "streaming.progress_interval_ms": 0,
        **{key.replace("__", "."): value for key, value in flags.items()},
    }
    ports = RouterPorts(
        redis=lambda timeout_s: cast(RedisClient, registry),
        actors=actors,
        tokenizer=BytesTokenizer,
        rng=FirstOfEquals,
    )
    router = build_router(load(flags=settings), SERVICE, ports, timing)
    await router.start()
    cluster = Cluster(router, registry)
    try:
        yield cluster
        await until(cluster.idle)
        router.membership.check_invariants()
    finally:
        await cluster.close()


# What tests ask of it and of its answers.

_OPEN_FIELDS = ("model", "request_id", "cache_salt", "priority")


def whole_text(max_tokens: int = 8, seed: int | None = None) -> str:
    """What one engine alone answers to `hello`."""
    return expected_text(
        HELLO, SamplingSpec(max_tokens=max_tokens, temperature=0.0 if seed is None else 1.0, seed=seed)
    )


def named(cluster: Cluster, name: str) -> Worker:
    return next(worker for worker in cluster.workers if worker.name == name)


def text_of(responses: Sequence[api.GenerateResponse | api.StreamGenerateResponse]) -> str:
    return "".join(delta_of(response).text for response in responses)


def tokens_of(responses: Sequence[api.GenerateResponse | api.StreamGenerateResponse]) -> list[int]:
    return [token for response in responses for token in delta_of(response).token_ids]


def delta_of(response: api.GenerateResponse | api.StreamGenerateResponse) -> generation.CompletionDelta:
    if isinstance(response, api.StreamGenerateResponse) and response.HasField("first_token"):
        return response.first_token.delta
    return response.delta


def session_open(prefix: str | None, mode: str, **values: Any) -> api.SessionOpen:
    """Values that are no field of `open` are fields of its sampling."""
    fields = {name: values.pop(name) for name in _OPEN_FIELDS if name in values}
    sampling = generation.SamplingParams(**{"temperature": 0.0, "max_tokens": 8, **values})
    number = generation.SessionMode.Value(f"SESSION_MODE_{mode}")
    text = None if prefix is None else generation.PromptInput(text=prefix)
    return api.SessionOpen(mode=number, prefix=text, sampling=sampling, **fields)


def session_text(prompt: str, max_tokens: int = 8) -> str:
    """What one engine alone answers to a prompt."""
    return expected_text(tuple(prompt.encode()), SamplingSpec(max_tokens=max_tokens, temperature=0.0))


def completion_of(responses: list[api.GenerateResponse]) -> generation.Completion:
    """The one completion, which is last."""
    assert [response.WhichOneof("event") for response in responses] == ["delta"] * (len(responses) - 1) + ["completion"]
    return responses[-1].completion


async def collected(call: Any) -> list[api.GenerateResponse]:
    return [response async for response in call]


async def failure(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return caught.value


def trailer(error: grpc.aio.AioRpcError, key: str) -> Any:
    metadata: Any = error.trailing_metadata()
    return dict(metadata)[key]


def retry_after_ms(error: grpc.aio.AioRpcError) -> int:
    return int(trailer(error, "retry-after-ms"))


def field_of(error: grpc.aio.AioRpcError) -> str:
    bad = BadRequest()
    assert Status.FromString(trailer(error, "grpc-status-details-bin")).details[0].Unpack(bad)
    return str(bad.field_violations[0].field)
