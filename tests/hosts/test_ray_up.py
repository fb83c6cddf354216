"""`ray up` over SSH, one pool on each of two hosts, and what happens when a cable or a power cord is pulled.

The tests come in this order, on one cluster: each leaves it as it found it, but for the last two, which take it down.
Tokens are compared with one plain vLLM, before, during and after every fault.
"""

import asyncio
from collections.abc import Sequence

import grpc
import pytest
from rachis import AsyncClient
from rachis.errors import UnauthenticatedError, UnavailableError
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire

from benchmarks.direct_call import DirectWorker
from cluster_wire.secret import Secret
from tests.hosts.cluster import REDIS_PORT, ROUTER_PORT, Cluster
from tests.hosts.netlab import REPOSITORY, LabError, cables
from tests.hosts.prompts import Answers, Prompt, generate, requests_meanwhile
from tests.integration.conftest import until

_BACK_S = 180.0


async def test_each_pool_serves_from_its_own_host(
    cluster: Cluster, client: AsyncClient, answers: Answers, prompts: list[Prompt]
) -> None:
    workers = {worker.node: worker for worker in await _workers(client)}
    for host, pool in (("prefill", wire.POOL_PREFILL), ("decode", wire.POOL_DECODE)):
        assert workers[host].pool == pool
        assert workers[host].address.startswith(f"{cluster.hosts[host].address}:")
        # The only project that a host has is the one that `ray up` brought.
        assert "control_plane" not in cluster.hosts[host].run(f"ls {REPOSITORY} || true")
    # The negative control: an engine that answers every prompt alike would pass all that follows.
    assert len({tuple(tokens) for tokens in answers.values()}) == len(answers)
    await _served_by_both_pools(client, answers, _fresh(prompts, 4))


async def test_a_host_without_the_secret_is_answered_by_nobody(cluster: Cluster, client: AsyncClient) -> None:
    """It is on the network of the others, as this process is: hands are shaken by who has the secret alone."""
    for worker in await _workers(client):
        for secret in (None, Secret(bytes(32))):
            assert await _refusal(worker.address, worker.generation, secret) is grpc.StatusCode.UNAVAILABLE
    async with AsyncClient(cluster.router_address, api_key=cluster.key) as in_the_clear:
        with pytest.raises(UnavailableError):
            await in_the_clear.identity(5.0)
    credentials = grpc.ssl_channel_credentials(cluster.ca.read_bytes())
    async with AsyncClient(cluster.router_address, credentials=credentials, api_key="") as nobody:
        with pytest.raises(UnauthenticatedError):
            await nobody.identity(30.0)


async def test_ray_answers_nobody_without_its_token(cluster: Cluster, client: AsyncClient) -> None:
    """The laptop reaches the head's ports; and who has the token is answered."""
    asked = f"ray status --address {cluster.head.address}:6379"
    for token in ("RAY_AUTH_MODE=disabled", f"RAY_AUTH_MODE=token RAY_AUTH_TOKEN={'0' * 64}"):
        with pytest.raises(LabError, match="Authentication token is missing or incorrect"):
            await asyncio.to_thread(cluster.laptop.run, f"{token} {asked}", 60.0)
    assert "rachis_prefill" in await asyncio.to_thread(cluster.head.run, "ray status", 60.0)


async def test_a_cut_prefill_host_costs_no_token_and_comes_back_as_another(
    cluster: Cluster, client: AsyncClient, answers: Answers, prompts: list[Prompt]
) -> None:
    host = cluster.hosts["prefill"]
    before = await _worker(client, wire.POOL_PREFILL)
    async with requests_meanwhile(client, _fresh(prompts, 16)) as stream:
        await until(stream.has_begun, "the first requests are answered")
        host.cut()
        await cluster.until_nodes(["head", "decode"])
    # One that was on its way to the host may wait there until its own deadline.
    assert (stream.refused, stream.wrong(answers)) == ([], [])
    assert len(stream.expired) < len(stream.answered)
    assert stream.by_decode_pool()

    for prompt in _fresh(prompts, 2):
        alone = await generate(client, prompt)
        assert (alone.completion.route.prefill_worker_id, alone.token_ids) == ("", answers[prompt])
    # The negative control: on its own host the worker that was given up goes on.
    assert _runs(cluster, before)

    async with requests_meanwhile(client, _fresh(prompts, 4), interval_s=0.5) as stream:
        host.mend()
        await cluster.until_nodes(cluster.hosts)
        after = await _another_ready(client, before)
    assert (stream.refused, stream.expired, stream.wrong(answers)) == ([], [], [])
    await _ended(cluster, before)
    # A call meant for the one before reaches the new one, and is refused.
    assert await _refusal(after.address, before.generation, cluster.secret) is grpc.StatusCode.FAILED_PRECONDITION
    await _served_by_both_pools(client, answers, _fresh(prompts, 4))


async def test_a_decode_host_without_power_makes_requests_wait_and_refuses_them_with_a_hint(
    cluster: Cluster, client: AsyncClient, answers: Answers, prompts: list[Prompt]
) -> None:
    host = cluster.hosts["decode"]
    before = await _worker(client, wire.POOL_DECODE)
    async with requests_meanwhile(client, _fresh(prompts, 16), interval_s=0.5) as stream:
        await until(stream.has_begun, "the first requests are answered")
        host.power_off()
        await cluster.until_nodes(["head", "prefill"])
        host.power_on()
        await cluster.until_nodes(cluster.hosts)
        await _another_ready(client, before)
    assert (stream.wrong(answers), stream.refused_badly(), stream.expired) == ([], [], [])
    assert stream.answered and stream.refused
    await _served_by_both_pools(client, answers, _fresh(prompts, 4))


async def test_a_drained_worker_leaves_without_losing_a_request(
    cluster: Cluster, client: AsyncClient, answers: Answers, prompts: list[Prompt]
) -> None:
    drained = await _worker(client, wire.POOL_PREFILL)
    async with requests_meanwhile(client, _fresh(prompts, 8)) as stream:
        await until(stream.has_begun, "the first requests are answered")
        await asyncio.to_thread(cluster.head.run, f"{cluster.asking} rachis drain {drained.worker_id}", 60.0)
    assert (stream.refused, stream.expired, stream.wrong(answers)) == ([], [], [])
    assert stream.by_decode_pool()
    await _ended(cluster, drained)


async def test_what_keeps_a_second_service_from_starting_is_said_with_the_host(
    cluster: Cluster, client: AsyncClient
) -> None:
    redis = f"{cluster.head.address}:{REDIS_PORT}"
    for host in (cluster.head, cluster.hosts["prefill"]):
        host.run("cp -r rachis/builtin_model/weights model")
        # Another one on each.
        host.run("head -c 32 /dev/urandom | base64 > secret")
    cases = {
        "model.path=/root/model": ["the model /root/model is not on node decode", "copy it there"],
        f"redis.url=redis://:wrong@{redis}/0": [redis, "password", "redis.url"],
        f"router.port={ROUTER_PORT}": [f"cannot listen on {cluster.router_address}"],
        f"redis.port={REDIS_PORT}": [f"{REDIS_PORT}", "redis.port"],
        "security.secret_file=/root/secret": [
            "node prefill (10.77.0.11): security.secret_file: /root/secret is another one than that of `rachis serve`",
            "node decode (10.77.0.12): security.secret_file: /root/secret cannot be read",
        ],
    }
    outputs = await asyncio.gather(*(asyncio.to_thread(_refused, cluster, setting) for setting in cases))
    for output, said in zip(outputs, cases.values(), strict=True):
        assert [words for words in said if words not in output] == [], output
        assert "Traceback" not in output
    # The service that runs is none the worse for it.
    assert len(await _workers(client)) == 1


async def test_after_ray_down_nothing_is_left(cluster: Cluster, client: AsyncClient) -> None:
    assert cluster.head.processes()
    assert await cluster.stop_serving() == 0
    assert "No nodes remaining" in await cluster.down()
    left: dict[str, tuple[list[str], list[int]]] = {}

    async def nothing_left() -> bool:
        """Ray keeps its SSH connections for another ten seconds."""
        found = {host.name: (host.processes(), host.listening_ports()) for host in cluster.hosts.values()}
        left.clear()
        left.update({name: what for name, what in found.items() if any(what)})
        return not left

    try:
        await until(nothing_left, "no process and no port is left", timeout_s=180)
    finally:
        assert left == {}
    assert len(cables()) == len(cluster.hosts)
    for host in cluster.hosts.values():
        host.power_off()
    await until(_no_cables, "the hosts' networks are gone")


def _refused(cluster: Cluster, setting: str) -> str:
    """What `rachis serve` says that cannot start with this setting, beside the service that runs."""
    own = {"service.name": "second", "router.port": 0, "router.admin_port": 0, "redis.port": 0}
    others = " ".join(f"--set {key}={value}" for key, value in {**own, "limits.start_timeout_s": 40}.items())
    serve = f"RACHIS_STATE_DIR=$(mktemp -d) rachis serve --address auto --config service.yaml {others} --set {setting}"
    with pytest.raises(LabError) as refused:
        cluster.head.run(serve, timeout_s=60.0)
    return str(refused.value)


async def _refusal(address: str, generation_number: int, secret: Secret | None) -> grpc.StatusCode:
    """How a call to a worker ends that is not to be served."""
    worker = DirectWorker(address, generation_number, secret)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await worker.first_token([1, 2, 3])
    await worker.close()
    return refused.value.code()


def _fresh(prompts: list[Prompt], count: int) -> list[Prompt]:
    """Some that no engine of the cluster has seen."""
    return [prompts.pop() for _ in range(count)]


async def _served_by_both_pools(client: AsyncClient, answers: Answers, prompts: Sequence[Prompt]) -> None:
    for prompt in prompts:
        generated = await generate(client, prompt)
        route = generated.completion.route
        assert generated.token_ids == answers[prompt]
        assert route.prefill_worker_id and route.decode_worker_id
        assert route.handoff == generation.HANDOFF_OUTCOME_PULLED
        assert route.kv_bytes > 0


async def _workers(client: AsyncClient) -> list[wire.WorkerRegistration]:
    return [view.registration for view in await client.workers()]


async def _worker(client: AsyncClient, pool: wire.Pool.ValueType) -> wire.WorkerRegistration:
    """The only one of its pool."""
    (worker,) = [worker for worker in await _workers(client) if worker.pool == pool]
    return worker


async def _another_ready(client: AsyncClient, before: wire.WorkerRegistration) -> wire.WorkerRegistration:
    """The next generation of a worker, once it serves."""

    async def ready() -> wire.WorkerRegistration | None:
        ready = [
            worker
            for worker in await _workers(client)
            if worker.pool == before.pool
            and worker.generation > before.generation
            and worker.state == wire.WORKER_STATE_READY
        ]
        return ready[0] if ready else None

    worker: wire.WorkerRegistration = await until(ready, f"another {before.worker_id} is ready", timeout_s=_BACK_S)
    return worker


async def _ended(cluster: Cluster, worker: wire.WorkerRegistration) -> None:
    async def gone() -> bool:
        return not _runs(cluster, worker)

    await until(gone, f"the process of {worker.worker_id} is gone", timeout_s=60)


async def _no_cables() -> bool:
    return cables() == []


def _runs(cluster: Cluster, worker: wire.WorkerRegistration) -> bool:
    """Whether this process still exists, on its host, whatever the rest of the cluster knows of it."""
    return cluster.hosts[worker.node].run(f"test -d /proc/{worker.pid} && echo yes || echo no").strip() == "yes"
