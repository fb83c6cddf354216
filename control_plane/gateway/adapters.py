"""Which LoRA adapters the service has, followed by a gateway: they are models beside the model."""

import asyncio
from collections.abc import Callable, Sequence

import grpc
from rachis import AsyncClient
from rachis.v1 import router_pb2 as api

_EVERY_S = 0.5
_TIMEOUT_S = 2.0


async def follow(client: AsyncClient, on_adapters: Callable[[Sequence[api.ServedAdapter]], None]) -> None:
    """Asks a router again and again, until cancelled; while none answers, adapters stay as they are."""
    while True:
        await look(client, on_adapters)
        await asyncio.sleep(_EVERY_S)


async def look(client: AsyncClient, on_adapters: Callable[[Sequence[api.ServedAdapter]], None]) -> None:
    try:
        response = await client.models(_TIMEOUT_S)
    except grpc.aio.AioRpcError:
        return
    on_adapters(response.adapters)
