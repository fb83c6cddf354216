"""Which LoRA adapters the service has, followed by a gateway: they are models beside the model."""

import asyncio
from collections.abc import Callable, Sequence

import grpc
from rachis import AsyncClient
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import worker_pb2 as wire

_EVERY_S = 0.5
_TIMEOUT_S = 2.0


async def follow(client: AsyncClient, on_adapters: Callable[[Sequence[wire.Adapter]], None]) -> None:
    """Asks a router again and again, until cancelled; while none answers, adapters stay as they are."""
    while True:
        await look(client, on_adapters)
        await asyncio.sleep(_EVERY_S)


async def look(client: AsyncClient, on_adapters: Callable[[Sequence[wire.Adapter]], None]) -> None:
    try:
        response = await client.admin.ListAdapters(admin.ListAdaptersRequest(), timeout=_TIMEOUT_S)
    except grpc.aio.AioRpcError:
        return
    on_adapters([view.adapter for view in response.adapters])
