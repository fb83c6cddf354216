"""One gateway process: finds out what a router's cluster serves, and serves the HTTP APIs for it."""

import asyncio
import json
import os
import ssl
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from prometheus_client import REGISTRY
from rachis import AsyncClient, tls
from rachis.metadata_channel import NO_KEY, Metadata
from rachis.v1 import router_pb2 as api

from cluster_configs.exposure import check_gateway_exposure
from cluster_configs.listening import is_loopback
from cluster_configs.schema import GatewaySection, ModelSection, SecuritySection
from cluster_core import event_log
from cluster_core.clock import monotonic_s
from cluster_core.errors import StartError
from cluster_wire.members import caller_metadata
from cluster_wire.redis_client import connect
from cluster_wire.secret import Secret, read_secret
from control_plane.gateway import adapters
from control_plane.gateway.front_log import FrontLog
from control_plane.gateway.stored_responses import TIMEOUT_S, StoredResponses

_ASK_AGAIN_S = 0.5
_ASK_TIMEOUT_S = 10.0
_BACKLOG = 2048
# Beyond the largest frame that is answered: what is longer still ends its connection.
_FRAME_SLACK_BYTES = 1 << 20


async def served_model(client: AsyncClient, timeout_s: float) -> api.ServedModel:
    """What the workers say that they serve. Waits for the first of them; raises StartError where none comes."""
    until_s = monotonic_s() + timeout_s
    while monotonic_s() < until_s:
        try:
            return (await client.models(_ASK_TIMEOUT_S)).model
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                raise StartError(
                    "the router has keys: the gateway needs its secret", field="security.secret_file"
                ) from None
        await asyncio.sleep(_ASK_AGAIN_S)
    raise StartError(f"no router with a worker was found within {timeout_s:g} s: what is served is not known")


def front_arguments(model: api.ServedModel, host: str, port: int) -> list[str]:
    """Options of vLLM's front; the user's own come after them, and so prevail."""
    path = ModelSection(path=model.tokenizer).resolved_path
    own = ["--model", path, "--served-model-name", model.name, "--max-model-len", str(model.max_model_len)]
    if model.imitates:
        # Its length is not that of the model whose tokenizer is taken.
        own += ["--hf-overrides", json.dumps({"max_position_embeddings": model.max_model_len})]
    return [*own, "--host", host, "--port", str(port)]


def tls_arguments(security: SecuritySection) -> list[str]:
    """Likewise; certificates that change are taken up."""
    if security.certificate_file is None or security.certificate_key_file is None:
        return []
    own = ["--ssl-certfile", security.certificate_file, "--ssl-keyfile", security.certificate_key_file]
    clients = [] if security.client_ca_file is None else ["--ssl-ca-certs", security.client_ca_file]
    needed = [] if security.client_ca_file is None else ["--ssl-cert-reqs", str(int(ssl.CERT_REQUIRED))]
    return [*own, *clients, *needed, "--enable-ssl-refresh"]


def client_of_routers(address: str, security: SecuritySection, api_key: str) -> AsyncClient:
    """With the service's own certificate, where routers ask for one. Raises InvalidInputError for a missing file.
    api_key: empty: who calls through this is nobody, whatever the certificate says."""
    if security.certificate_file is None or security.certificate_key_file is None:
        return AsyncClient(address, api_key=api_key)
    own = tls.read(security.certificate_file, "security.certificate_file")
    trusted = own if security.ca_file is None else tls.read(security.ca_file, "security.ca_file")
    key = tls.read(security.certificate_key_file, "security.certificate_key_file")
    credentials = grpc.ssl_channel_credentials(trusted, key, own)
    client = AsyncClient(address, credentials=credentials, server_name=security.server_name, api_key=api_key)
    return client if api_key else client.calling_with(NO_KEY)


async def run(
    address: str,
    section: GatewaySection,
    security: SecuritySection,
    given: Sequence[str],
    *,
    redis_url: str = "",
    wait_s: float,
    on_listening: Callable[[str, str], None],
) -> None:
    """Serves until a signal. address: of routers, as `AsyncClient` takes it. given: options of vLLM's front.
    security: where it names the service's secret, callers are asked for their keys. redis_url: where responses are
    stored; empty: nowhere. on_listening: gets model and URL."""
    assert section.port is not None, "it is given"
    async with AsyncExitStack() as stack:
        secret = read_secret(Path(security.secret_file)) if security.secret_file is not None else None
        own_key = secret.service_key if secret is not None else ""
        client = await stack.enter_async_context(client_of_routers(address, security, own_key))
        model = await served_model(client, wait_s)
        store = await _store(client, section, redis_url, stack) if redis_url else None
        # What vLLM's front logs goes the way of all else: it reads this when it is imported.
        os.environ["VLLM_CONFIGURE_LOGGING"] = "0"
        # Imported here: it takes long, and brings torch.
        from control_plane.gateway import front
        from control_plane.gateway.gateway_metrics import GatewayCollector
        from control_plane.gateway.responses_socket import max_bytes
        from control_plane.gateway.router_core import RouterCore
        from control_plane.gateway.socket_endpoint import SocketEndpoint
        from control_plane.gateway.stored_http import StoredRoutes, StoringResponses
        from control_plane.gateway.vllm_responses import VllmResponses

        event_log.look_first(FrontLog(front.REFUSALS))
        args = front.parsed([*front_arguments(model, section.host, section.port), *tls_arguments(security), *given])
        # The user's own options may say another host.
        check_gateway_exposure(security, args.host or "0.0.0.0")
        url, sock = front.listen(args)
        try:
            engine = front.make_engine(args, RouterCore(client))
            callers = _callers(secret, security, args, client) if secret is not None else None
            # A request is as large as it may be over a WebSocket.
            app = await front.make_app(args, engine, callers, max_bytes(section.websocket))
            on_adapters = partial(front.serve_adapters, app)
            await adapters.look(client, on_adapters)
            following = asyncio.create_task(adapters.follow(client, on_adapters))
            stack.callback(following.cancel)
            # A WebSocket makes frames of what is raised.
            responses = VllmResponses(app.state.openai_serving_responses.serving)
            if store is not None:
                app.state.openai_serving_responses = StoringResponses(app.state.openai_serving_responses, store)
                StoredRoutes(store).attach(app)
            endpoint = SocketEndpoint(responses, client, store, section.websocket)
            endpoint.attach(app)
            REGISTRY.register(GatewayCollector(endpoint, store))
            # Bound before, it takes connections from now on: those of others that share the port had no place here.
            sock.listen(_BACKLOG)
            on_listening(model.name, url)
            await front.serve(app, args, sock, max_bytes(section.websocket) + _FRAME_SLACK_BYTES)
        finally:
            sock.close()


def _callers(secret: Secret, security: SecuritySection, args: Any, client: AsyncClient) -> Callable[[Any], Any]:
    """args: of vLLM's front."""
    # As in `run`.
    from control_plane.gateway import front
    from control_plane.gateway.callers import Callers

    return partial(
        Callers,
        client=client,
        answer=front.refusal_of_router,
        may_be_open=security.open or is_loopback(args.host or "0.0.0.0"),
        hand_on=handing_on(secret, security, args.ssl_ca_certs),
    )


def handing_on(secret: Secret, security: SecuritySection, trusted: str | None) -> Callable[[bytes], Metadata] | None:
    """By what routers are told of certificates of callers; None: they are not. trusted: the file of the authorities by
    which the front knows its clients; the user's own options may have made it another one, which no router knows."""
    if security.client_ca_file is None or trusted != security.client_ca_file:
        return None
    return partial(caller_metadata, secret)


async def _store(
    client: AsyncClient, section: GatewaySection, redis_url: str, stack: AsyncExitStack
) -> StoredResponses:
    """Of the routers' service. Raises StartError."""
    try:
        service_id = (await client.router_status()).service_id
        redis = connect(redis_url, TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        raise StartError(f"the router does not say which service it is of ({error.details()})") from None
    except ValueError as error:
        raise StartError(f"is no URL of a Redis: {error}", field="--redis") from None
    store = StoredResponses(redis, service_id, section.stored_responses)
    stack.push_async_callback(store.close)
    return store
