"""One gateway process: finds out what a router's cluster serves, and serves the HTTP APIs for it."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

import grpc
from rachis import AsyncClient
from rachis.v1 import worker_pb2 as wire

from cluster_configs.schema import ModelSection
from cluster_core.clock import monotonic_s
from cluster_core.errors import StartError

_ASK_AGAIN_S = 0.5
_BACKLOG = 2048


async def served_model(client: AsyncClient, timeout_s: float) -> wire.ModelInfo:
    """What the workers say that they serve. Waits for the first of them; raises StartError where none comes."""
    until_s = monotonic_s() + timeout_s
    while monotonic_s() < until_s:
        with suppress(grpc.aio.AioRpcError):
            for worker in await client.workers():
                if worker.registration.model.name:
                    return worker.registration.model
        await asyncio.sleep(_ASK_AGAIN_S)
    raise StartError(f"no router with a worker was found within {timeout_s:g} s: what is served is not known")


def front_arguments(model: wire.ModelInfo, host: str, port: int, given: Sequence[str]) -> list[str]:
    """Options of vLLM's front. given: the user's own, which come last and so prevail."""
    path = ModelSection(path=model.tokenizer).resolved_path
    own = ["--model", path, "--served-model-name", model.name, "--max-model-len", str(model.max_model_len)]
    return [*own, "--host", host, "--port", str(port), *given]


async def run(
    address: str, host: str, port: int, given: Sequence[str], *, wait_s: float, on_listening: Callable[[str, str], None]
) -> None:
    """Serves until a signal. address: of routers, as `AsyncClient` takes it. on_listening: gets model and URL."""
    async with AsyncClient(address) as client:
        model = await served_model(client, wait_s)
        # Imported here: it takes long, and brings torch.
        from control_plane.gateway import front
        from control_plane.gateway.router_core import RouterCore

        args = front.parsed(front_arguments(model, host, port, given))
        url, sock = front.listen(args)
        try:
            engine = front.make_engine(args, RouterCore(client))
            app = await front.make_app(args, engine)
            # Bound before, it takes connections from now on: those of others that share the port had no place here.
            sock.listen(_BACKLOG)
            on_listening(model.name, url)
            await front.serve(app, args, sock)
        finally:
            sock.close()
