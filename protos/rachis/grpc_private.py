"""What clients touch of grpcio that is private: a write to a call, without its verdict on the call.

A write that fails because the call is over makes grpcio replace the call's status by INTERNAL and end the reading of it
(grpc/grpc#36066): what the router has answered, and why it ended, would be lost.
"""

import asyncio
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc._cython import cygrpc


async def write(call: Any, message: Message) -> bool:
    """Waits while the window is full. False where the call takes nothing any more; reading it tells why.

    A call behind interceptors, or over another transport, is written to as anybody would.
    """
    if not hasattr(call, "_cython_call"):
        return await _write_in_public(call, message)
    if not (call.done() or call._metadata_sent.is_set()):
        # Of a call that is over before its metadata has gone out nobody else says so.
        call.add_done_callback(lambda over: over._metadata_sent.set())
        await call._metadata_sent.wait()
    if call.done():
        return False
    try:
        await call._cython_call.send_serialized_message(message.SerializeToString())
    except cygrpc.InternalError:
        return False
    except asyncio.CancelledError:
        # Half of a message may be gone, as with a public write.
        call.cancel()
        raise
    return True


async def _write_in_public(call: Any, message: Message) -> bool:
    try:
        await call.write(message)
    except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
        return False
    return True
