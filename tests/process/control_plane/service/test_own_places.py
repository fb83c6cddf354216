"""Where a service is to listen on its host, in both families of addresses."""

import asyncio
import socket
import urllib.request

import pytest
from rachis import AsyncClient
from rachis.errors import UnavailableError

from cluster_configs.loading import load
from cluster_configs.schema import RachisConfig
from cluster_core.errors import StartError
from cluster_core.ports import family_of
from command_line.doctor.surroundings import reached
from control_plane.service.own_places import check_free, reachable
from tests.fakes.cluster import running_cluster

HOSTS = ("127.0.0.1", "::1", "[::1]", "0.0.0.0", "::")


def config_of(host: str, **ports: int | None) -> RachisConfig:
    own = {"router.host": host, "gateway.host": host, "router.port": 0, "gateway.port": 0, "router.admin_port": 0}
    return load(flags=own | {name.replace("__", "."): port for name, port in ports.items()}).config


@pytest.mark.parametrize("host", HOSTS)
def test_places_of_both_families_are_free_until_somebody_listens_there(host: str) -> None:
    plain = host.strip("[]")
    check_free(config_of(host))
    with socket.create_server((plain, 0), family=family_of(plain)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=r"^router\.port: cannot listen on "):
            check_free(config_of(host, router__port=port))
        with pytest.raises(StartError, match=r"^gateway\.port: cannot listen on .*; null starts none$"):
            check_free(config_of(host, gateway__port=port))


def test_who_listens_on_all_addresses_has_the_port_in_both_families() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(StartError, match=r"cannot listen on \[::\]:"):
        check_free(config_of("::", router__port=taken.getsockname()[1]))


@pytest.mark.parametrize(
    ("address", "found"),
    [
        ("0.0.0.0:7421", "127.0.0.1:7421"),
        ("[::]:7421", "[::1]:7421"),
        ("[::1]:7421", "[::1]:7421"),
        ("10.0.0.7:7421", "10.0.0.7:7421"),
    ],
)
def test_commands_on_the_host_reach_a_router_that_listens_everywhere(address: str, found: str) -> None:
    assert reachable(address) == found


@pytest.mark.parametrize(
    ("listens", "host", "found"),
    [
        ("[::1]:9", "::1", "[::1]:9"),
        ("[::]:9", "fd00::7", "[fd00::7]:9"),
        ("0.0.0.0:9", "10.0.0.7", "10.0.0.7:9"),
        ("10.0.0.8:9", "10.0.0.7", "10.0.0.8:9"),
    ],
)
def test_the_doctor_reads_the_pages_of_both_families(listens: str, host: str, found: str) -> None:
    assert reached(listens, host) == found


@pytest.mark.parametrize("host", ["::1", "[::1]", "::"])
async def test_a_router_answers_over_ipv6_at_all_of_its_doors(host: str) -> None:
    async with running_cluster(router__host=host, router__admin_host="::1", router__admin_port=0) as cluster:
        router = cluster.router
        assert router.address.startswith(f"[{host.strip('[]')}]:") and router.admin_address.startswith("[::1]:")
        async with AsyncClient(reachable(router.address)) as client:
            with pytest.raises(UnavailableError, match="no worker has registered yet"):
                await client.models(timeout_s=60)
        async with AsyncClient(router.admin_address) as client:
            metrics = (await client.router_status()).metrics_url
        url = metrics.replace("[::]", "[::1]").replace("/metrics", "/livez")
        assert url.startswith("http://[::1]:")
        with await asyncio.to_thread(urllib.request.urlopen, url, timeout=60) as answer:
            assert answer.status == 200
