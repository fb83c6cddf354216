"""Who may ask where a worker's KV lies: parts of the service, which know a key that is derived from its secret.

vLLM's connector answers whoever reaches its port with what is needed to read the KV of all requests, and a message that
it does not understand ends the thread that answers. With a secret the channel is CurveZMQ (ZeroMQ RFC 26): encrypted,
and nobody gets a message through who does not know the server's public key, which is never sent.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import zmq
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_scheduler, base_worker
from vllm.utils.network_utils import make_zmq_socket
from zmq.utils import z85


def secure(private_key: bytes) -> None:
    """From now on, in this process. private_key: 32 bytes, the same at all workers of a service."""
    secret = z85.encode(private_key)
    public = zmq.curve_public(secret)

    def context(socket_type: int) -> Any:
        """Its sockets have these options before they are bound or connected."""
        made = zmq.Context()
        if socket_type == zmq.ROUTER:
            made.curve_server, made.curve_secretkey = True, secret
        else:
            made.curve_publickey, made.curve_secretkey = zmq.curve_keypair()
            made.curve_serverkey = public
        return made

    @contextmanager
    def zmq_ctx(socket_type: int, address: str) -> Iterator[Any]:
        own = context(socket_type)
        try:
            yield make_zmq_socket(own, address, socket_type, bind=socket_type == zmq.ROUTER)
        finally:
            own.destroy(linger=0)

    # Both sides ask for their sockets by this name.
    for module in (base_scheduler, base_worker):
        assert hasattr(module, "zmq_ctx"), "vLLM has another name for it"
        vars(module)["zmq_ctx"] = zmq_ctx
