"""Pages that the doctor reads of places that may not be what they seem."""

import socket
import threading

import pytest

from command_line.own_pages import page_of

_HEAD = b"HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\n"


def test_a_page_that_never_ends_is_given_up() -> None:
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        dripping = threading.Thread(target=_drip, args=(server, over))
        dripping.start()
        try:
            with pytest.raises(TimeoutError, match=r"after 0\.2 s"):
                page_of(f"http://127.0.0.1:{server.getsockname()[1]}/metrics", timeout_s=0.2)
        finally:
            over.set()
            dripping.join()


def _drip(server: socket.socket, over: threading.Event) -> None:
    """A byte now and then, for a minute where nobody leaves."""
    client, _ = server.accept()
    with client:
        client.sendall(_HEAD)
        for _ in range(1200):
            if over.wait(0.05):
                return
            try:
                client.sendall(b"x")
            except OSError:
                return
