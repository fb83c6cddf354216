"""Which address a worker is reached under, and what vLLM, NIXL and UCX are told of it."""

from pathlib import Path

import pytest

from cluster_configs.schema import EngineSection
from cluster_core.errors import StartError
from worker_runtime import addresses
from worker_runtime.addresses import interface_of, own_address, ucx_devices
from worker_runtime.engine_settings import ports_needed

HOST = "127.0.0.1"
INTERFACES = {"lo": [HOST, "::1"], "eth0": ["192.168.7.4"], "bond0": ["10.1.0.4", "fd00::4"]}


def test_the_address_is_the_one_in_the_network() -> None:
    assert own_address("10.1.0.0/16", "192.168.7.4", 3, INTERFACES, "a") == "10.1.0.4"
    assert own_address("fd00::/8", "192.168.7.4", 3, INTERFACES, "a") == "fd00::4"
    assert interface_of("10.1.0.4", INTERFACES) == "bond0"
    assert interface_of("172.16.0.1", INTERFACES) is None


def test_without_a_network_it_is_the_one_that_ray_knows_the_node_by() -> None:
    assert own_address(None, "192.168.7.4", 3, INTERFACES, "a") == "192.168.7.4"


def test_a_node_outside_the_network_is_told_with_the_addresses_it_has() -> None:
    with pytest.raises(StartError) as refusal:
        own_address("10.9.0.0/16", "192.168.7.4", 3, INTERFACES, "node-b")
    assert str(refusal.value) == (
        "pools.network: node node-b has no address in 10.9.0.0/16, only 10.1.0.4 (bond0), fd00::4 (bond0), "
        "192.168.7.4 (eth0), 127.0.0.1 (lo), ::1 (lo); correct pools.network, or the addresses of that node"
    )


@pytest.mark.parametrize("network", [None, "127.0.0.0/8"])
def test_loopback_is_refused_as_soon_as_there_is_another_node(network: str | None) -> None:
    assert own_address(network, HOST, 1, INTERFACES, "a") == HOST
    with pytest.raises(
        StartError, match=r"node a would be reached under 127\.0\.0\.1, which is loopback, but .* 2 nodes"
    ):
        own_address(network, HOST, 2, INTERFACES, "a")


def test_this_hosts_interfaces_are_found() -> None:
    assert HOST in addresses.interfaces()["lo"]
    assert not any("%" in address for found in addresses.interfaces().values() for address in found)


def test_ucx_keeps_to_the_interface_of_the_address_unless_there_is_rdma(tmp_path: Path) -> None:
    assert ucx_devices("10.1.0.4", INTERFACES, tmp_path) == "bond0"
    assert ucx_devices("203.0.113.7", INTERFACES, tmp_path) is None, "an address that only others know"
    (tmp_path / "mlx5_0").mkdir()
    assert ucx_devices("10.1.0.4", INTERFACES, tmp_path) is None
    assert ucx_devices(HOST, INTERFACES, tmp_path) == "lo"


def test_each_rank_needs_ports_of_its_own() -> None:
    assert ports_needed(EngineSection(tensor_parallel_size=2)) == 12
