"""Which client a URL gives."""

import pytest
import redis.asyncio as redis
from pydantic import ValidationError
from redis.asyncio.cluster import RedisCluster

from cluster_configs.schema import RedisSection
from cluster_wire.redis_client import connect


@pytest.mark.parametrize("url", ["redis://host:6379/0", "rediss://:secret@host:6379/0", "unix:///run/redis.sock"])
async def test_a_single_servers_url(url: str) -> None:
    client = connect(RedisSection(url=url).url or "", timeout_s=1.5)

    assert isinstance(client, redis.Redis)
    assert client.connection_pool.connection_kwargs["socket_timeout"] == 1.5
    assert client.connection_pool.connection_kwargs["socket_connect_timeout"] == 1.5


@pytest.mark.parametrize(
    ("url", "is_encrypted"), [("redis+cluster://u:p@host:7000", False), ("rediss+cluster://host:7000/0", True)]
)
async def test_a_clusters_url(url: str, is_encrypted: bool) -> None:
    client = connect(RedisSection(url=url).url or "", timeout_s=1.5)

    assert isinstance(client, RedisCluster)
    (node,) = client.nodes_manager.startup_nodes.values()
    assert (node.host, node.port) == ("host", 7000)
    assert client.connection_kwargs["socket_timeout"] == 1.5
    assert ("ssl_keyfile" in client.connection_kwargs) is is_encrypted


@pytest.mark.parametrize("url", ["http://host", "unix+cluster:///run/redis.sock", "host:6379"])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ValidationError):
        RedisSection(url=url)
