"""Who may ask where a worker's KV lies: parts of the service, which know a key that is derived from its secret.

vLLM's connector answers whoever reaches its port with what is needed to read the KV of all requests, and a message that
it does not understand ends the thread that answers. With a secret the channel is CurveZMQ (ZeroMQ RFC 26): encrypted,
and nobody gets a message through who does not know the server's public key, which is never sent.
"""

import zmq
from zmq.utils import z85

from kv_transfer import vllm_private


def secure(private_key: bytes) -> None:
    """From now on, in this process. private_key: 32 bytes, the same at all workers of a service."""
    secret = z85.encode(private_key)
    public = zmq.curve_public(secret)

    def context(socket_type: int) -> "zmq.Context[zmq.Socket[bytes]]":
        """Its sockets have these options before they are bound or connected."""
        made = zmq.Context()
        if socket_type == zmq.ROUTER:
            made.curve_server = True
            made.curve_secretkey = secret
        else:
            own_public, own_secret = zmq.curve_keypair()
            made.curve_serverkey = public
            made.curve_publickey, made.curve_secretkey = own_public, own_secret
        return made

    vllm_private.use_side_channel_contexts(context)
