"""TCP ports for servers that want to be told one: chosen now, listened on seconds later.

A port that was merely found free is anybody's until then. The system hands it to the next outgoing connection that asks
for any port, the server cannot bind, and vLLM's NIXL listener for one then keeps its engine waiting without a word.
"""

import socket

_held: list[socket.socket] = []


def hold_port(host: str) -> int:
    """A port of `host` that the system gives to nobody else while this process lives.

    It is bound with SO_REUSEADDR and not listened on, so that a server which sets SO_REUSEADDR as well (libzmq, Redis),
    in this process or another, can listen on it whenever it is ready, and again after it was restarted.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((host, 0))
    _held.append(holder)
    return int(holder.getsockname()[1])
