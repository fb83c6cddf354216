"""What can be read between a router and its workers, and whom a router tells anything.

With a secret all of it is encrypted, and goes to workers that have the same one alone. That the same relay reads
prompts without one, and the key where nothing is encrypted, shows that this looks in the right place.
"""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from rachis import AsyncClient, token_prompt
from rachis.errors import RachisError
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire
from rachis.v1 import worker_pb2_grpc

from benchmarks.certificates import Authority
from cluster_core.ids import WorkerId
from cluster_wire.members import MembersOnly, member_metadata
from cluster_wire.secret import Secret, read_secret, write_secret
from cluster_wire.worker_tls import WORKER_NAME, MakeChannel, add_worker_port, authority_of, worker_channel
from control_plane.fleet.worker_client import WorkerClient, WorkerUnreachableError
from control_plane.model.worker_snapshot import WorkerSnapshot
from prefill_worker.service import PrefillService
from tests.fakes.cluster import DECODE, PREFILL, Cluster, running_cluster
from tests.fakes.engine import FakeEngine
from tests.fakes.wiretap import Wiretap, tapped

# As tokens, too, it is these bytes: each is one.
PROMPT = "what nobody on the workers' network is to read"
# Of the one who listens, and of a service that has another one.
SECRET, OTHER = Secret(b"a" * 32), Secret(b"b" * 32)


class Tapped:
    """A cluster whose workers are reached through relays."""

    def __init__(self, cluster: Cluster, stack: AsyncExitStack) -> None:
        self.cluster = cluster
        self._stack = stack
        self.taps: list[Wiretap] = []

    async def add(self, pool: wire.Pool.ValueType, **options: Any) -> None:
        await self.cluster.add(pool, reached_at=self._through, **options)

    @property
    def passed(self) -> bytes:
        return b"".join(tap.passed for tap in self.taps)

    async def _through(self, address: str) -> str:
        tap, there = await self._stack.enter_async_context(tapped(address))
        self.taps.append(tap)
        return there


@asynccontextmanager
async def tapped_cluster(channel: MakeChannel | None = None, **flags: Any) -> AsyncIterator[Tapped]:
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(running_cluster(channel=channel, **flags))
        yield Tapped(cluster, stack)


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    write_secret(tmp_path / "secret")
    return tmp_path / "secret"


async def ask_and_open_a_session(cluster: Cluster) -> None:
    """What there is to say to workers: requests of both pools, sessions, a lease and its release."""
    async with AsyncClient(cluster.router.address, api_key="") as client:
        cluster.calls += 2
        whole = await client.generate(PROMPT, max_tokens=4, temperature=0.0)
        async with client.session(max_tokens=4, temperature=0.0) as session:
            await session.append(PROMPT[:10])
            pieces = [token async for piece in session.finish(PROMPT[10:]) for token in piece.token_ids]
        assert whole.token_ids == pieces


async def test_with_a_secret_neither_prompts_nor_the_key_nor_names_are_read(secret_file: Path) -> None:
    async with tapped_cluster(security__secret_file=str(secret_file)) as tapped:
        await tapped.add(PREFILL)
        await tapped.add(DECODE)
        await ask_and_open_a_session(tapped.cluster)
        names = [job.request_id for worker in tapped.cluster.workers for job in worker.engine.jobs]
        assert len(tapped.passed) > 2000 and names
        key = read_secret(secret_file).service_key
        for said in (PROMPT, PROMPT[:10], key, "rachis-service-key", "Prefill", *names):
            assert said.encode() not in tapped.passed, said


async def test_without_a_secret_prompts_are_read() -> None:
    async with tapped_cluster() as tapped:
        await tapped.add(PREFILL)
        await tapped.add(DECODE)
        await ask_and_open_a_session(tapped.cluster)
        names = [job.request_id for worker in tapped.cluster.workers for job in worker.engine.jobs]
        for said in (PROMPT, PROMPT[:10], "Prefill", *names):
            assert said.encode() in tapped.passed, said


async def test_where_nothing_is_encrypted_the_key_is_read() -> None:
    """Planted: both ends have the secret, and speak as if they had none."""
    server = grpc.aio.server(interceptors=[MembersOnly(SECRET)])
    async with served(server, add_worker_port(server, "127.0.0.1:0", None)) as (worker, tap):
        client = WorkerClient(1 << 20, grpc.aio.insecure_channel, member_metadata(SECRET))
        assert (await client.prefill(worker, request(), 30.0)).first.token_ids
        await client.close()
    assert SECRET.service_key.encode() in tap.passed and PROMPT.encode() in tap.passed


def request() -> wire.PrefillRequest:
    return wire.PrefillRequest(
        request_id="r#1",
        generation=1,
        token_ids=list(PROMPT.encode()),
        sampling=generation.SamplingParams(max_tokens=1),
    )


@asynccontextmanager
async def served(server: grpc.aio.Server, port: int) -> AsyncIterator[tuple[WorkerSnapshot, Wiretap]]:
    """A prefill worker behind a relay. port: the server's, which serves nothing yet."""
    record = wire.WorkerRegistration(worker_id="prefill-0", generation=1, state=wire.WORKER_STATE_READY)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(PrefillService(FakeEngine(), record, lambda: None), server)
    await server.start()
    async with tapped(f"127.0.0.1:{port}") as (tap, address):
        yield WorkerSnapshot(WorkerId("prefill-0"), 1, wire.POOL_PREFILL, address), tap
    await server.stop(None)


class Impostors:
    """Each has a server listen as somebody who has not got the secret, and answers every call."""

    @staticmethod
    def with_another_secret(server: grpc.aio.Server, folder: Path) -> int:
        return add_worker_port(server, "127.0.0.1:0", OTHER)

    @staticmethod
    def in_plain_text(server: grpc.aio.Server, folder: Path) -> int:
        return add_worker_port(server, "127.0.0.1:0", None)

    @staticmethod
    def with_a_certificate_of_its_own(server: grpc.aio.Server, folder: Path) -> int:
        """Of an authority of the same name, for the same name."""
        chain, key = Authority(folder / "stranger", "workers of a Rachis service").sign("worker", WORKER_NAME)
        credentials = grpc.ssl_server_credentials([(key.read_bytes(), chain.read_bytes())])
        return server.add_secure_port("127.0.0.1:0", credentials)

    @staticmethod
    def with_the_authority_and_no_key_of_it(server: grpc.aio.Server, folder: Path) -> int:
        """Who has seen the authority's certificate sends it along."""
        chain, key = Authority(folder / "stranger", "workers of a Rachis service").sign("worker", WORKER_NAME)
        whole = chain.read_bytes() + authority_of(SECRET)
        return server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key.read_bytes(), whole)]))


IMPOSTORS = [name for name in vars(Impostors) if not name.startswith("_")]


@pytest.mark.parametrize("who", IMPOSTORS)
async def test_an_impostor_is_not_reached_and_told_nothing(who: str, tmp_path: Path) -> None:
    server = grpc.aio.server()
    async with served(server, getattr(Impostors, who)(server, tmp_path)) as (worker, tap):
        client = WorkerClient(1 << 20, worker_channel(SECRET), member_metadata(SECRET))
        with pytest.raises(WorkerUnreachableError, match="prefill-0: failed to connect"):
            await client.prefill(worker, request(), 30.0)
        with pytest.raises(WorkerUnreachableError):
            await anext(client.decode(worker, wire.DecodeRequest(generation=1), 30.0).messages())
        async with client.prefill_session(worker, 30.0) as session:
            with pytest.raises(WorkerUnreachableError):
                await session.read()
        await client.close()
    assert tap.passed, "hands were tried"
    for kept in (SECRET.service_key, PROMPT, "rachis-service-key", "r#1"):
        assert kept.encode() not in tap.passed, kept


@pytest.mark.parametrize("secret", [OTHER, None], ids=["another secret", "none"])
async def test_a_router_without_the_secret_does_not_reach_a_worker_that_has_it(secret: Secret | None) -> None:
    server = grpc.aio.server(interceptors=[MembersOnly(SECRET)])
    async with served(server, add_worker_port(server, "127.0.0.1:0", SECRET)) as (worker, tap):
        client = WorkerClient(1 << 20, worker_channel(secret), member_metadata(secret))
        with pytest.raises(WorkerUnreachableError):
            await client.prefill(worker, request(), 30.0)
        await client.close()
    assert PROMPT.encode() not in tap.passed and (secret is None or secret.service_key.encode() not in tap.passed)


async def test_who_has_shaken_hands_still_needs_the_key() -> None:
    """The authority's certificate is no secret of its own: who has got it may speak, and is not answered."""
    server = grpc.aio.server(interceptors=[MembersOnly(SECRET)])
    async with (
        served(server, add_worker_port(server, "127.0.0.1:0", SECRET)) as (worker, _),
        worker_channel(SECRET)(worker.address) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await worker_pb2_grpc.WorkerServiceStub(channel).Prefill(request(), timeout=30)
        assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_requests_go_where_the_secret_is_and_end_in_a_sentence_where_it_is_nowhere(secret_file: Path) -> None:
    async with tapped_cluster(
        security__secret_file=str(secret_file), router__queue_timeout_s=0.5
    ) as tapped, AsyncClient(tapped.cluster.router.address, api_key="") as client:  # fmt: skip
        # The first of equals is asked first.
        await tapped.add(PREFILL, secret=OTHER)
        await tapped.add(DECODE, secret=None)
        tapped.cluster.calls += 2
        with pytest.raises(RachisError) as raised:
            await client.generate(token_prompt(list(PROMPT.encode())), max_tokens=4, temperature=0.0)
        assert raised.value.status == "UNAVAILABLE"
        for pool in (PREFILL, DECODE):
            await tapped.cluster.add(pool)
        answer = await client.generate(token_prompt(list(PROMPT.encode())), max_tokens=4, temperature=0.0)
        assert answer.token_ids
        for kept in (PROMPT, read_secret(secret_file).service_key):
            assert kept.encode() not in tapped.passed
