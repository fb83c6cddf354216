"""Three hosts with a Ray cluster and a service on them, shared by all tests, which come in order and mend what they
break."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from rachis import AsyncClient

from cluster_configs.loading import load
from tests.hosts import IN_NAMESPACE
from tests.hosts.cluster import ADMIN_PORT, REDIS_PORT, ROUTER_PORT, SECURITY, Cluster
from tests.hosts.disks import make_hosts
from tests.hosts.netlab import HostSpec, bring_up_network
from tests.hosts.prompts import Answers, Prompt, make_prompts, plain_answers

HEAD = HostSpec("head", "10.77.0.10")
PREFILL = HostSpec("prefill", "10.77.0.11")
DECODE = HostSpec("decode", "10.77.0.12")
SERVICE: dict[str, Any] = {
    "service": {"name": "lab"},
    "pools": {
        "network": "10.77.0.0/24",
        "prefill": {"node_resource": "rachis_prefill"},
        "decode": {"node_resource": "rachis_decode"},
    },
    "redis": {"port": REDIS_PORT},
    # Shorter than a host takes to come back: some requests are refused meanwhile.
    "router": {
        "host": HEAD.address,
        "port": ROUTER_PORT,
        "admin_host": HEAD.address,
        "admin_port": ADMIN_PORT,
        "queue_timeout_s": 10.0,
    },
    "security": SECURITY,
    # Both pools have to be used, however little there is to do.
    "placement": {"disaggregation": "always"},
}
_PROMPTS = 64


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first one waits for three nodes of Ray and two engines, which takes minutes on a busy machine."""
    skip = pytest.mark.skip(reason="hosts are made by `make test-hosts`")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(900))
            if os.environ.get(IN_NAMESPACE) != "1":
                item.add_marker(skip)


@pytest.fixture(scope="session")
def prompts() -> list[Prompt]:
    """Each is taken once, with `pop`, where it must not lie in a prefix cache yet."""
    return make_prompts(_PROMPTS, seed=8)


@pytest.fixture(scope="session")
def network() -> None:
    """What all hosts are connected to."""
    bring_up_network()


@pytest_asyncio.fixture(scope="session")
async def cluster(network: None, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """Hosts with Ray on them, and nothing else yet."""
    folder = tmp_path_factory.mktemp("hosts")
    laptop, hosts = make_hosts(folder, [HEAD, PREFILL, DECODE])
    try:
        for host in (laptop, *hosts):
            host.power_on()
        cluster = Cluster(laptop, hosts, SERVICE, folder)
        cluster.write_site_files()
        yield cluster
    finally:
        for host in (laptop, *hosts):
            host.power_off()


@pytest_asyncio.fixture(scope="session")
async def answers(cluster: Cluster, prompts: list[Prompt]) -> Answers:
    """What plain vLLM answers to the prompts, computed while `ray up` goes on."""
    answers, _ = await asyncio.gather(plain_answers(prompts, load().config), cluster.up())
    return answers


@pytest_asyncio.fixture(scope="session")
async def client(cluster: Cluster, answers: Answers) -> AsyncIterator[AsyncClient]:
    """Of the service on the cluster, by the door of administration, which answers prompts too."""
    await cluster.serve()
    credentials = grpc.ssl_channel_credentials(cluster.ca.read_bytes())
    async with AsyncClient(cluster.admin_address, credentials=credentials, api_key=cluster.key) as client:
        yield client
