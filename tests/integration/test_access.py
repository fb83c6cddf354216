"""A service with keys, real engines and a gateway: who is let in, and what tenants find of each other: nothing."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anthropic
import grpc
import httpx
import msgspec
import openai
import psutil
import pytest
import pytest_asyncio
import websockets
import zmq
from rachis import AsyncClient, token_prompt
from rachis.errors import PermissionDeniedError, UnauthenticatedError, UnavailableError
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire
from rachis.v1 import worker_pb2_grpc
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import GET_META_MSG
from zmq.utils import z85

from cluster_wire import registry
from cluster_wire.members import member_metadata, sealed
from cluster_wire.secret import Secret, read_secret
from cluster_wire.worker_tls import worker_channel
from control_plane.access.roles import HTTP_NEEDS, Identity, Need
from kv_transfer.claims.prefix_chunks import chunk_keys, root_key
from tests.command import rachis
from tests.integration.conftest import until
from tests.integration.keyed_service import KEYS, MODEL, PROMPT, TEXT, World, keyed_service

pytestmark = pytest.mark.integration


@pytest_asyncio.fixture(scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    async with keyed_service(tmp_path_factory.mktemp("access"), tmp_path_factory.mktemp("redis")) as made:
        yield made


@pytest.mark.parametrize("who", ["nobody", "acme", "zeta-looks", "ops"])
async def test_every_route_lets_in_whom_the_table_says(world: World, who: str) -> None:
    tenant, roles = KEYS.get(who, ("", ()))
    identity = Identity(who, tenant, frozenset(roles), 0)
    async with world.plain_http(who) as http:
        for path, need in {**HTTP_NEEDS, "/reset_prefix_cache": Need.OPERATE, "/": Need.OPERATE}.items():
            asked = path.replace("{id}", "resp_none")
            for method in ("GET", "HEAD", "POST", "DELETE", "OPTIONS"):
                response = await http.request(method, asked, json={} if method == "POST" else None)
                if need is Need.NOTHING:
                    assert response.status_code not in (401, 403), (method, path)
                elif who == "nobody":
                    assert response.status_code == 401, (method, path)
                    assert response.headers["www-authenticate"] == "Bearer"
                else:
                    assert (response.status_code == 403) == (not identity.may(need)), (method, path, response.text)
                    assert response.status_code != 401, (method, path)


async def test_every_route_of_the_front_stands_in_the_table(world: World) -> None:
    """What does not is for operators; this says which ones a new version of vLLM has brought."""
    async with world.plain_http("acme") as http:
        paths = (await http.get("/openapi.json")).json()["paths"]
    assert {path.replace("response_id", "id") for path in paths} <= set(HTTP_NEEDS)


async def test_sdks_bring_their_keys_and_hear_what_is_wrong(world: World) -> None:
    async with world.http("acme") as http, world.http("nobody") as stranger, world.http("zeta-looks") as looker:
        answer = await http.completions.create(model=MODEL, prompt=PROMPT, max_tokens=3, temperature=0)
        assert answer.choices[0].text
        with pytest.raises(openai.AuthenticationError, match="a valid API key is needed"):
            await stranger.completions.create(model=MODEL, prompt=PROMPT, max_tokens=3)
        with pytest.raises(openai.PermissionDeniedError, match="needs the role `generate`"):
            await looker.completions.create(model=MODEL, prompt=PROMPT, max_tokens=3)
        with pytest.raises(openai.PermissionDeniedError, match="priority: must be at least 0 with the key `acme`"):
            await http.completions.create(model=MODEL, prompt=PROMPT, max_tokens=3, extra_body={"priority": -1})
    turns: Any = [{"role": "user", "content": "hello"}]
    async with world.anthropic(world.key["acme"]) as claude:
        assert (await claude.messages.create(model=MODEL, max_tokens=3, messages=turns)).content
    async with world.anthropic("rk-none") as stranger_too:
        with pytest.raises(anthropic.AuthenticationError):
            await stranger_too.messages.create(model=MODEL, max_tokens=3, messages=turns)


async def test_nothing_is_answered_in_the_clear(world: World) -> None:
    async with httpx.AsyncClient() as http:
        with pytest.raises(httpx.HTTPError):
            await http.get(world.url.replace("https", "http") + "/health")
    async with AsyncClient(world.target.address, api_key=world.key["acme"]) as client:
        with pytest.raises(UnavailableError):
            await client.identity(5.0)


async def test_the_python_client_and_the_commands_bring_theirs(world: World) -> None:
    async with world.client("acme") as client, world.client("nobody") as stranger:
        assert (await client.identity()).tenant == "acme"
        with pytest.raises(UnauthenticatedError):
            await stranger.generate("x", max_tokens=1)
        with pytest.raises(UnauthenticatedError):
            async with stranger.session():
                pass
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await client.admin.ListWorkers(admin.ListWorkersRequest())
        assert raised.value.code() is grpc.StatusCode.PERMISSION_DENIED
        with pytest.raises(PermissionDeniedError, match="priority"):
            await client.generate("x", max_tokens=1, priority=-1)

    async def asked(who: str) -> Any:
        with world.environment(who):
            return await asyncio.to_thread(rachis, "status", "--address", world.target.address, "--json")

    assert json.loads((await asked("zeta-looks")).stdout.splitlines()[-1])["workers"]
    refused = await asked("acme")
    assert refused.exit_code != 0 and "this needs the role `observe`" in f"{refused.output} {refused.exception}"


async def _cached(world: World, who: str, **wishes: Any) -> int:
    async with world.client(who) as client:
        answer = await client.generate(token_prompt([7, *PROMPT]), max_tokens=2, temperature=0.0, **wishes)
    return int(answer.completion.usage.cached_tokens)


async def test_a_tenant_finds_its_own_prefixes_and_nobody_elses(world: World) -> None:
    assert await _cached(world, "acme") == 0
    own = await _cached(world, "acme")
    assert own > 300 and await _cached(world, "acme-too") == own, "keys of one tenant share"
    assert await _cached(world, "zeta") == 0
    assert await _cached(world, "acme", cache_salt="mine") == 0, "a client's salt refines its tenant's"
    assert await _cached(world, "zeta", cache_salt="mine") == 0


async def test_over_http_usage_tells_nothing_of_others_either(world: World) -> None:
    async def cached(who: str) -> int:
        async with world.http(who) as http:
            turns: Any = [{"role": "user", "content": TEXT}]
            answer = await http.chat.completions.create(model=MODEL, messages=turns, max_tokens=2, temperature=0)
        assert answer.usage is not None
        details = answer.usage.prompt_tokens_details
        return (details.cached_tokens or 0) if details is not None else 0

    await cached("acme")
    assert await cached("zeta") == 0


async def test_a_stored_response_is_its_tenants(world: World) -> None:
    async with world.http("acme") as mine, world.http("acme-too") as ours, world.http("zeta") as theirs:
        wishes: dict[str, Any] = {"model": MODEL, "max_output_tokens": 4, "temperature": 0}
        made = await mine.responses.create(input=TEXT, **wishes)
        assert (await ours.responses.retrieve(made.id)).id == made.id
        with pytest.raises(openai.NotFoundError):
            await theirs.responses.retrieve(made.id)
        with pytest.raises(openai.NotFoundError):
            await theirs.responses.create(input="more", previous_response_id=made.id, **wishes)
        with pytest.raises(openai.NotFoundError):
            await theirs.responses.delete(made.id)
        after = await ours.responses.create(input="more", previous_response_id=made.id, **wishes)
        assert after.previous_response_id == made.id
        await mine.responses.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            await mine.responses.retrieve(made.id)


async def test_a_websocket_is_opened_by_a_key_and_answers_in_its_name(world: World) -> None:
    url = world.url.replace("http", "ws") + "/v1/responses"
    with pytest.raises(websockets.InvalidStatus) as raised:
        await websockets.connect(url, ssl=world.trusting)
    assert raised.value.response.status_code == 401
    async with world.http("acme") as mine, world.http("zeta") as theirs:
        made = await mine.responses.create(model=MODEL, input=TEXT, max_output_tokens=4, temperature=0)
        options: Any = {"ssl": world.trusting}
        for http, is_found in ((mine, True), (theirs, False)):
            async with http.responses.connect(websocket_connection_options=options) as socket:
                opening: Any = {
                    "type": "response.create", "model": MODEL, "input": "more", "previous_response_id": made.id,
                    "max_output_tokens": 4, "temperature": 0,
                }  # fmt: skip
                await socket.send(opening)
                async for event in socket:
                    if event.type in ("response.completed", "error"):
                        assert (event.type == "response.completed") == is_found
                        break


async def test_a_revoked_key_is_refused_within_seconds_on_both_doors(world: World) -> None:
    async with world.http("leaves") as http, world.client("leaves") as client:
        await http.completions.create(model=MODEL, prompt="x", max_tokens=1)
        await client.generate("x", max_tokens=1)
        answered = rachis("keys", "revoke", "leaves", "--file", world.folder / "keys.json")
        assert answered.exit_code == 0

        async def is_refused() -> bool:
            try:
                await http.models.list()
                await client.generate("x", max_tokens=1)
            except openai.AuthenticationError:
                return True
            except UnauthenticatedError:
                return False
            return False

        await until(is_refused, "the gateway has heard of it")
        with pytest.raises(UnauthenticatedError):
            await client.generate("x", max_tokens=1)


def _dump(world: World) -> bytes:
    """All that Redis holds, as it holds it."""
    kinds: dict[Any, Any] = {
        b"string": world.redis.get,
        b"hash": world.redis.hgetall,
        b"stream": world.redis.xrange,
        b"zset": lambda key: world.redis.zrange(key, 0, -1),
        b"set": world.redis.smembers,
        b"list": lambda key: world.redis.lrange(key, 0, -1),
    }
    found = []

    def take(value: Any) -> None:
        if isinstance(value, dict):
            take(list(value.items()))
        elif isinstance(value, list | tuple | set):
            for each in value:
                take(each)
        else:
            found.append(value if isinstance(value, bytes) else str(value).encode())

    for key in world.redis.scan_iter():
        if b":response" not in key:
            take(key)
            take(kinds[world.redis.type(key)](key))
    return b"\n".join(found)


async def test_redis_and_metrics_confirm_no_guess_at_a_prompt_without_the_secret(world: World) -> None:
    """With the secret they do, which shows that this looks in the right place."""
    prompt = [13, *PROMPT]
    async with world.client("acme") as client:
        await client.generate(token_prompt(prompt), max_tokens=2, temperature=0.0)
        await client.generate(TEXT, max_tokens=2, temperature=0.0)

    def names(salt: str) -> list[bytes]:
        keys = chunk_keys(prompt, root_key(world.service_id, salt), 64)
        return [key.tobytes() for key in keys]

    real = names(read_secret(world.folder / "secret").salt("acme", "", "never"))

    async def is_told() -> bool:
        return any(name in _dump(world) for name in real)

    await until(is_told, "the workers have told Redis of it")
    dump = _dump(world)
    for guess in ("", "acme", "acme:", "ops", "zeta"):
        assert not any(name in dump for name in names(guess)), guess
    told = ("quick brown", "confidential", *filter(None, world.key.values()))
    assert not any(word.encode() in dump for word in told)
    async with world.client("ops") as ops:
        metrics_at = (await ops.router_status()).metrics_address
    async with httpx.AsyncClient() as http:
        metrics = (await http.get(f"http://{metrics_at}/metrics")).text
    assert "rachis_requests_total" in metrics
    for word in (*told, "acme", "zeta"):
        assert word not in metrics, word


async def test_workers_answer_parts_of_the_service_and_nobody_else(world: World) -> None:
    async with world.client("ops") as ops, world.client("acme") as client:
        records = [view.registration for view in await ops.workers()]
        answer = await client.generate(token_prompt([17, *PROMPT]), max_tokens=3, temperature=0.0)
    assert answer.completion.route.handoff == generation.HANDOFF_OUTCOME_PULLED, "they do answer each other"
    secret = read_secret(world.folder / "secret")
    for record in records:
        for stranger in (None, Secret(bytes(32))):
            async with worker_channel(stranger)(record.address) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await worker_pb2_grpc.WorkerServiceStub(channel).GetWorkerStatus(
                        wire.GetWorkerStatusRequest(), metadata=member_metadata(secret), timeout=30
                    )
                assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        async with worker_channel(secret)(record.address) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            for key in ("", "rs-guess", world.key["ops"]):
                brought = (("rachis-service-key", key),) if key else ()
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await stub.GetWorkerStatus(wire.GetWorkerStatusRequest(), metadata=brought, timeout=30)
                assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
            await stub.GetWorkerStatus(wire.GetWorkerStatusRequest(), metadata=member_metadata(secret), timeout=30)


async def test_a_worker_that_somebody_has_made_up_in_redis_is_none(world: World) -> None:
    """Whoever can write there would be sent prompts, and the key of the service's parts."""
    async with world.client("ops") as ops:
        (record,) = [view.registration for view in await ops.workers() if view.registration.pool == wire.POOL_DECODE]
        record.worker_id, record.address = "decode-7", "127.0.0.1:9"

        async def knows() -> bool:
            return "decode-7" in {view.registration.worker_id for view in await ops.workers()}

        key, names = registry.worker_key(world.service_id, "decode-7"), registry.workers_key(world.service_id)
        world.redis.sadd(names, "decode-7")
        try:
            secret = read_secret(world.folder / "secret")
            world.redis.set(key, sealed(secret, record.SerializeToString()))
            await until(knows, "with the secret it is one")
            world.redis.set(key, record.SerializeToString())
            await until(lambda: _not(knows), "without it is none")
        finally:
            world.redis.delete(key)
            world.redis.srem(names, "decode-7")


async def _not(asked: Callable[[], Awaitable[bool]]) -> bool:
    return not await asked()


async def test_where_kv_lies_is_told_to_workers_of_the_service_alone(world: World) -> None:
    """vLLM's own question, to each port that a prefill worker listens on; in the clear, and with a key of another."""
    async with world.client("ops") as ops:
        (pid,) = [view.registration.pid for view in await ops.workers() if view.registration.pool == wire.POOL_PREFILL]
    listening = psutil.Process(pid).net_connections("tcp")
    ports = {each.laddr.port for each in listening if each.status == psutil.CONN_LISTEN}
    right, wrong = read_secret(world.folder / "secret").side_channel_key, os.urandom(32)

    async def answered(key: bytes | None) -> set[int]:
        found = await asyncio.gather(*(asyncio.to_thread(_is_told, port, key) for port in ports))
        return {port for port, is_told in zip(ports, found, strict=True) if is_told}

    assert not await answered(None) and not await answered(wrong)
    assert len(await answered(right)) == 1


def _is_told(port: int, key: bytes | None) -> bool:
    with zmq.Context() as context, context.socket(zmq.REQ) as socket:
        socket.linger, socket.rcvtimeo = 0, 2000
        if key is not None:
            socket.curve_serverkey = zmq.curve_public(z85.encode(key))
            socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.connect(f"tcp://127.0.0.1:{port}")
        socket.send(msgspec.msgpack.encode((GET_META_MSG, 0, 0)))
        try:
            return len(socket.recv_multipart()) == 2
        except zmq.Again:
            return False


async def test_what_operators_do_is_written_down(world: World) -> None:
    async with world.client("ops") as ops:
        await ops.admin.DrainWorker(admin.DrainWorkerRequest(worker_id="prefill-0"))
        await ops.admin.ResumeWorker(admin.ResumeWorkerRequest(worker_id="prefill-0"))
    lines = [json.loads(line) for line in (world.folder / "audit.jsonl").read_text().splitlines()]
    assert [(line["key"], line["call"], line["status"]) for line in lines[-2:]] == [
        ("ops", "DrainWorker", "OK"),
        ("ops", "ResumeWorker", "OK"),
    ]
