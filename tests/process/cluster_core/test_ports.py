"""A held port: nobody is given it by chance, and the server it is held for can listen on it."""

import errno
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator

import grpc
import pytest
import zmq
from rachis.conventions import channel_options

from cluster_core.errors import StartError
from cluster_core.ports import PortRange, address_of, free_ports, hold_port
from worker_runtime.addresses import addresses_in, interfaces

HOST = "127.0.0.1"
_IP_LOCAL_PORT_RANGE = 51


def test_the_system_gives_a_held_port_to_nobody_who_asks_for_any_port() -> None:
    held = hold_port(HOST)
    with _only_port(held) as bound, pytest.raises(OSError, match="in use"):
        bound.bind((HOST, 0))
    with socket.socket() as listener, _only_port(held) as connected:
        listener.bind((HOST, 0))
        listener.listen()
        assert connected.connect_ex(listener.getsockname()) == errno.EADDRNOTAVAIL


def test_the_listener_of_nixls_handshake_takes_it_and_takes_it_again() -> None:
    held = hold_port(HOST)
    for _ in range(2):
        with zmq.Context() as context, context.socket(zmq.ROUTER) as listener:
            listener.bind(f"tcp://{HOST}:{held}")
            with socket.socket() as client:
                client.connect((HOST, held))


def _only_port(port: int) -> socket.socket:
    """A socket to which the system may give no other port than this one."""
    asking = socket.socket()
    try:
        asking.setsockopt(socket.IPPROTO_IP, _IP_LOCAL_PORT_RANGE, struct.pack("=I", port | port << 16))
    except OSError:
        asking.close()
        pytest.skip("Linux before 6.3 cannot narrow the range of ports of one socket")
    return asking


@pytest.fixture
def ports() -> Iterator[PortRange]:
    """Three free ports of loopback, side by side."""
    first = next(port for port in range(21_000, 30_000, 3) if free_ports(HOST, PortRange(port, port + 2), 3) == 3)
    yield PortRange(first, first + 2)


def test_a_range_gives_each_of_its_ports_once_and_then_says_so(ports: PortRange) -> None:
    with socket.create_server((HOST, ports.first)):
        assert [hold_port(HOST, ports), hold_port(HOST, ports)] == [ports.first + 1, ports.last]
        with pytest.raises(StartError, match=rf"^pools\.ports: no port of {ports} is free on {HOST}: end what"):
            hold_port(HOST, ports, "pools.ports")
    assert free_ports(HOST, ports, 3) == 1


def test_no_two_processes_hold_the_same_port_of_a_range_and_one_that_died_holds_none(ports: PortRange) -> None:
    holding = "import sys, signal; from cluster_core.ports import *; print(hold_port(sys.argv[1], PortRange.parse("
    holding += "sys.argv[2])), flush=True); signal.pause()"
    process = subprocess.Popen([sys.executable, "-c", holding, HOST, str(ports)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert int(process.stdout.readline()) == ports.first
        assert free_ports(HOST, ports, 3) == 2
        # Without the claim both would have it: neither listens.
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind((HOST, ports.first))
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    assert hold_port(HOST, ports) == ports.first


def test_a_port_whose_last_connection_still_winds_down_is_free(ports: PortRange) -> None:
    one = PortRange(ports.first, ports.first)
    with socket.create_server((HOST, ports.first)) as listener, socket.create_connection((HOST, ports.first)) as client:
        served, _ = listener.accept()
        served.close()
        assert client.recv(1) == b""
    with socket.socket() as plain, pytest.raises(OSError, match="in use"):
        plain.bind((HOST, ports.first))

    assert hold_port(HOST, one) == ports.first


async def test_a_grpc_server_listens_on_a_held_port(ports: PortRange) -> None:
    held = hold_port(HOST, ports)
    server = grpc.aio.server(options=channel_options(1 << 20))
    assert server.add_insecure_port(address_of(HOST, held)) == held
    await server.start()
    with socket.socket() as client:
        client.connect((HOST, held))
    await server.stop(None)


def test_an_address_that_is_not_this_hosts_is_told() -> None:
    with pytest.raises(StartError, match=r"^redis\.host: cannot listen on 203\.0\.113\.7: "):
        hold_port("203.0.113.7", field="redis.host")


def test_an_ipv6_address_is_written_with_brackets() -> None:
    assert address_of("::1", 7) == "[::1]:7"
    assert address_of(HOST, 7) == f"{HOST}:7"


@pytest.mark.skipif("::1" not in addresses_in("::1/128", interfaces()), reason="this host has no IPv6")
def test_a_port_of_an_ipv6_address_is_held() -> None:
    assert hold_port("::1") > 0
