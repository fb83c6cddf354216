"""A held port: nobody is given it by chance, and the server it is held for can listen on it."""

import errno
import socket
import struct

import pytest
import zmq

from cluster_core.ports import hold_port

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
