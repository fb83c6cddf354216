"""How many sessions may be open, in all and of one client."""

from contextlib import ExitStack

import pytest

from cluster_core.errors import OverloadedError
from control_plane.sessions.places import OpenSessions, client_of


@pytest.mark.parametrize(
    ("peer", "client"),
    [
        ("ipv4:10.0.0.7:51234", "ipv4:10.0.0.7"),
        ("ipv6:%5B::1%5D:51234", "ipv6:%5B::1%5D"),
        ("unix:/run/rachis.sock", "unix:/run/rachis.sock"),
        ("unix:", "unix:"),
    ],
)
def test_connections_of_one_host_are_one_client(peer: str, client: str) -> None:
    assert client_of(peer) == client


def test_a_place_is_given_back_whatever_ends_the_session() -> None:
    sessions = OpenSessions(2, 1)
    with pytest.raises(ZeroDivisionError), sessions.one_more("ipv4:10.0.0.7:1"):
        assert len(sessions) == 1
        raise ZeroDivisionError
    assert len(sessions) == 0
    with sessions.one_more("ipv4:10.0.0.7:2"):
        pass


def test_one_client_does_not_take_the_places_of_others() -> None:
    sessions = OpenSessions(3, 2)
    with ExitStack() as held:
        for port in (1, 2):
            held.enter_context(sessions.one_more(f"ipv4:10.0.0.7:{port}"))
        with pytest.raises(OverloadedError, match="max_client_sessions"), sessions.one_more("ipv4:10.0.0.7:3"):
            pass
        held.enter_context(sessions.one_more("ipv4:10.0.0.8:1"))
        with pytest.raises(OverloadedError, match="max_open_sessions"), sessions.one_more("ipv4:10.0.0.9:1"):
            pass
    assert len(sessions) == 0
