"""What a service says that it serves: to gateways, and to whoever has a key."""

from collections.abc import Sequence

import grpc
import pytest
from rachis import AsyncClient
from rachis.errors import UnavailableError
from rachis.v1 import router_pb2 as api
from rachis.v1 import worker_pb2 as wire

from cluster_core.errors import StartError
from control_plane.gateway import adapters, gateway
from tests.fakes.cluster import DECODE, MODEL, running_cluster


async def test_before_a_worker_has_said_it_is_not_known_and_then_it_is() -> None:
    async with running_cluster() as cluster, AsyncClient(cluster.router.address) as client:
        with pytest.raises(UnavailableError, match="no worker has registered yet") as raised:
            await client.models(10.0)
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE and raised.value.retry_after_ms == 1000
        await cluster.add(DECODE)
        told = await client.models(10.0)
        assert told.model == api.ServedModel(name="fake", tokenizer="bytes", max_model_len=MODEL.max_model_len)
        assert not told.adapters


async def test_a_gateway_waits_for_the_first_worker_and_asks_no_admin_call() -> None:
    """At the public door of a router whose administration is apart."""
    async with running_cluster(router__admin_port=0) as cluster, AsyncClient(cluster.router.address) as client:
        with pytest.raises(StartError, match=r"no router with a worker was found within 0\.2 s"):
            await gateway.served_model(client, 0.2)
        await cluster.add(DECODE)
        assert (await gateway.served_model(client, 10.0)).name == "fake"
        cluster.parts.adapters.known["tone"] = wire.Adapter(name="tone", path="/adapters/tone", digest="d")
        told: list[Sequence[api.ServedAdapter]] = []
        await adapters.look(client, told.append)
        assert [(each.name, each.path) for each in told[0]] == [("tone", "/adapters/tone")]
        cluster.parts.adapters.known.clear()


async def test_adapters_are_told_by_name_in_order() -> None:
    async with running_cluster() as cluster, AsyncClient(cluster.router.address) as client:
        await cluster.add(DECODE)
        for name in ("tone", "code"):
            cluster.parts.adapters.known[name] = wire.Adapter(name=name, path=f"/adapters/{name}", digest="d")
        told = await client.models(10.0)
        assert [(each.name, each.path) for each in told.adapters] == [
            ("code", "/adapters/code"), ("tone", "/adapters/tone"),
        ]  # fmt: skip
        cluster.parts.adapters.known.clear()
