"""A router that shares its port: it listens there last, so that nobody waits at one that cannot answer yet."""

import asyncio
import socket
from typing import Any, cast

from rachis.v1 import worker_pb2 as wire

from cluster_configs.loading import load
from cluster_core import versions
from cluster_core.ports import hold_port
from cluster_wire.redis_client import RedisClient
from control_plane.server.composition import RouterPorts, build_router
from control_plane.server.router_server import RouterServer
from tests.fakes.cluster import DECODE, SERVICE, BytesTokenizer, until
from tests.fakes.registry import RegistryRedis
from worker_runtime.wire_conversion import to_wire

HOST = "127.0.0.1"


def sharing(registry: RegistryRedis, **section: Any) -> RouterServer:
    own = {"port": hold_port(HOST), "share_port": True, "admin_port": 0, "drain_timeout_s": 1, **section}
    loaded = load(flags={f"router.{name}": value for name, value in own.items()} | {"redis.refresh_s": 0.001})
    ports = RouterPorts(redis=lambda timeout_s: cast(RedisClient, registry), tokenizer=BytesTokenizer)
    return build_router(loaded, SERVICE, ports)


def listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as caller:
        return caller.connect_ex((host, int(port))) == 0


async def test_it_listens_there_once_it_knows_a_worker_and_at_its_own_doors_before() -> None:
    registry, shared = RegistryRedis(SERVICE), f"{HOST}:{(port := hold_port(HOST))}"
    router = sharing(registry, port=port, queue_timeout_s=600)
    starting = asyncio.create_task(router.start())
    await until(lambda: router.admin_address != "" and listens(router.admin_address))
    assert not listens(shared) and not starting.done()

    registry.write(
        wire.WorkerRegistration(
            worker_id="decode-0", generation=1, pool=DECODE, state=wire.WORKER_STATE_READY, address=f"{HOST}:1",
            versions=to_wire(versions.installed(), wire.Versions),
        )
    )  # fmt: skip
    await starting
    assert listens(shared) and router.address == shared
    await router.stop()


async def test_without_workers_it_listens_after_as_long_as_a_request_would_wait() -> None:
    router = sharing(RegistryRedis(SERVICE), queue_timeout_s=0.05)
    await router.start()
    assert listens(router.address)
    await router.stop()
