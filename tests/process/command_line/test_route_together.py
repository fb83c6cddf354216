"""`rachis route --processes`: real routers behind one port, over a decode worker that computes nothing."""

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import pytest_asyncio
from rachis import AsyncClient, prompts, token_prompt
from rachis.routers import channel_options
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import router_pb2 as api
from rachis.v1 import router_pb2_grpc

from benchmarks import child_module
from benchmarks.kept_command import KeptCommand
from benchmarks.paced_worker import PacedWorker
from builtin_model import WEIGHTS
from cluster_core.errors import StartError
from control_plane.service.embedded_redis import EmbeddedRedis

# The command, and what each of its routers says.
Together = tuple[KeptCommand, list[dict[str, Any]]]
SERVICE = "together"
TOKENS = 4
# One of a hundred goes to one of two processes: two to the power of minus 99 is none.
MOST_CALLERS = 100
REQUEST = api.GenerateRequest(
    prompt=prompts.token_prompt([1, 2, 3]), sampling=generation.SamplingParams(max_tokens=TOKENS, ignore_eos=True)
)


@dataclass(frozen=True, slots=True)
class Place:
    """A service with a worker and without a router."""

    folder: Path
    redis_url: str

    def routers(self, count: int, port: int | None = None, **section: Any) -> KeptCommand:
        settings = {"model.path": str(WEIGHTS), "service.name": SERVICE, "redis.url": self.redis_url}
        named = {"admin_port": 0, **section}
        own = {name.replace("__", ".") if "__" in name else f"router.{name}": value for name, value in named.items()}
        return KeptCommand("route", {**settings, **own}, self.folder, options=("--processes", str(count)), port=port)

    @asynccontextmanager
    async def routed(self, count: int, **section: Any) -> AsyncIterator[Together]:
        kept = self.routers(count, **section)
        up = await kept.start()
        assert kept.process is not None
        pids = [router["pid"] for router in up["routers"]]
        try:
            yield kept, up["routers"]
        finally:
            ended = await kept.stop()
        assert ended == 0
        assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest_asyncio.fixture(scope="module")
async def place(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Place]:
    folder = tmp_path_factory.mktemp("together")
    redis = EmbeddedRedis(folder)
    await redis.start()
    worker = PacedWorker(redis.url, SERVICE, str(WEIGHTS), str(WEIGHTS), 64, 50.0)
    try:
        async with child_module.running("benchmarks.paced_worker", asdict(worker), folder) as process:
            await child_module.said(process)
            yield Place(folder, redis.url)
    finally:
        await redis.stop()


@pytest_asyncio.fixture(scope="module")
async def together(place: Place) -> AsyncIterator[Together]:
    """Two routers, of which tests may kill one and wait until it is back."""
    async with place.routed(2) as routed:
        yield routed


@asynccontextmanager
async def calling(address: str) -> AsyncIterator[Callable[[], Awaitable[int]]]:
    """Asks over a connection of its own, as another process would; says how many tokens came."""
    options = [*channel_options(), ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(address, options) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)

        async def ask() -> int:
            return sum([len(response.delta.token_ids) async for response in stub.Generate(REQUEST, timeout=60)])

        yield ask


async def status(router: dict[str, Any]) -> admin.GetRouterStatusResponse:
    async with AsyncClient(router["admin_address"]) as client:
        return await client.router_status()


async def answered(router: dict[str, Any]) -> int:
    return sum((await status(router)).outcomes.values())


async def once_back(router: dict[str, Any]) -> int:
    """What it has answered since."""
    async with asyncio.timeout(120):
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                return await answered(router)
            await asyncio.sleep(0.1)


async def test_callers_are_spread_over_the_processes_of_a_port_and_each_tells_of_its_own(
    together: Together,
) -> None:
    kept, routers = together
    async with AsyncExitStack() as stack:
        assert len({router["pid"] for router in routers}) == 2
        assert {router["address"] for router in routers} == {kept.address}
        asked = 0
        while not all([await answered(router) for router in routers]):
            ask = await stack.enter_async_context(calling(kept.address))
            assert await ask() == TOKENS
            asked += 1
            assert asked < MOST_CALLERS, "the kernel shares them out"
        assert sum([await answered(router) for router in routers]) == asked


async def test_an_answer_outlives_its_process_which_is_started_again_where_it_was(
    together: Together,
) -> None:
    kept, routers = together
    async with AsyncClient(kept.address) as client:
        came, killed = 0, None
        async for piece in client.stream(token_prompt([1, 2, 3]), max_tokens=100, ignore_eos=True):
            came += len(piece.token_ids) if isinstance(piece, generation.CompletionDelta) else 0
            if killed is None:
                (killed,) = [router for router in routers if (await status(router)).in_flight_requests]
                os.kill(killed["pid"], signal.SIGKILL)
        assert killed is not None
        assert (came, client.resumes) == (100, 1)
        assert await once_back(killed) == 0, "it is another one"


async def test_answers_end_before_the_routers_do(place: Place) -> None:
    async with place.routed(2) as (kept, _), AsyncClient(kept.address) as client:
        stopping = None
        came = 0
        async for piece in client.stream(token_prompt([1, 2, 3]), max_tokens=50, ignore_eos=True):
            came += len(piece.token_ids) if isinstance(piece, generation.CompletionDelta) else 0
            stopping = stopping or asyncio.create_task(kept.stop())
        assert (came, client.resumes) == (50, 0)
        assert stopping is not None and await stopping == 0


@pytest.mark.parametrize("name", ["port", "admin_port", "metrics_port"])
async def test_a_port_that_somebody_has_is_not_shared_with_them(place: Place, name: str) -> None:
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as other:
        taken = other.getsockname()[1]
        kept = place.routers(2, taken) if name == "port" else place.routers(2, **{name: taken})
        with pytest.raises(StartError, match=rf"router.{name}: port {taken} is taken on 127.0.0.1"):
            await kept.start()


async def test_a_port_that_routers_share_is_nobody_elses(place: Place, together: Together) -> None:
    taken = port_of(together[0])
    for count in (1, 2):
        with pytest.raises(StartError, match=r"cannot listen|is taken"):
            await place.routers(count, taken).start()
    with pytest.raises(StartError, match="is set by `rachis route --processes` alone"):
        await place.routers(1, taken, share_port=True).start()


async def test_routers_of_which_one_cannot_start_say_why_and_leave_nothing(place: Place, tmp_path: Path) -> None:
    before, key = (router_pids(), set(place.folder.glob("route-*.json"))), tmp_path / "no-key.pem"
    with pytest.raises(StartError, match=r"a router did not come up: .*no-key.pem"):
        await place.routers(2, security__certificate_file=str(key), security__certificate_key_file=str(key)).start()
    assert (router_pids(), set(place.folder.glob("route-*.json"))) == before, "what may hold a password goes with them"


async def test_what_becomes_of_a_router_is_told_and_its_configuration_stays(place: Place) -> None:
    kept = place.routers(2)
    up = await kept.start()
    assert kept.process is not None and kept.process.stdout is not None
    assert up["pid"] == kept.process.pid
    configuration = place.folder / f"route-{port_of(kept)}.yaml"
    configuration.write_text("service: {name: another}")
    killed = up["routers"][1]
    os.kill(killed["pid"], signal.SIGKILL)
    told = [json.loads(await kept.process.stdout.readline()) for _ in range(2)]
    assert [(each["event"], each["number"]) for each in told] == [("router_ended", 1), ("router_listening", 1)]
    assert (told[0]["status"], told[1]["service_id"]) == (-signal.SIGKILL, SERVICE)
    assert told[1]["admin_address"] == killed["admin_address"] and told[1]["pid"] != killed["pid"]
    assert await kept.stop() == 0


def port_of(kept: KeptCommand) -> int:
    return int(kept.address.rpartition(":")[2])


def router_pids() -> set[int]:
    """Of all that one of `rachis route --processes` keeps."""
    return {each.pid for each in psutil.Process().children(recursive=True) if "--number" in each.cmdline()}
