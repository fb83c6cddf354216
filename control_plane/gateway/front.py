"""vLLM's HTTP front, put together over a router: names of vLLM's entry points are here and in `vllm_responses` only.

`tests/integration/test_gateway_parts.py` fails loudly on another version. Configuration is made as `vllm launch render`
makes it: no kernels, no KV cache. The app is that of vLLM's `build_app` without its last step, SageMaker's bootstrap,
which starts the middleware stack: what is added after it would be refused.
"""

import argparse
import os
from collections.abc import Callable, Sequence
from typing import Any, cast

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from rachis import RachisError
from rachis.v1 import router_pb2 as api
from starlette.middleware.cors import CORSMiddleware
from vllm import envs
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.anthropic.api_router import translate_error_response
from vllm.entrypoints.generate.api_router import register_generate_api_routers
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.launchers.launcher import serve_http, setup_server
from vllm.entrypoints.launchers.utils.server_utils import lifespan
from vllm.entrypoints.openai.models.api_router import attach_router as attach_models
from vllm.entrypoints.serve import register_vllm_serve_api_routers
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.entrypoints.serve.middleware.register import init_entrypoints_middleware
from vllm.exceptions import VLLMClientError
from vllm.lora.request import LoRARequest
from vllm.utils.argparse_utils import FlexibleArgumentParser

from control_plane.gateway.bounded_body import BoundedBody
from control_plane.gateway.failed_streams import EndedMessages, EndedResponses
from control_plane.gateway.late_status import LateStatus
from control_plane.gateway.refusals import AccessRefused, RouterRefused, as_vllm_error, headers_of
from control_plane.gateway.router_core import TASKS, RouterCore, RouterEngine
from control_plane.gateway.shown_certificate import CertificateProtocol
from control_plane.intake.validation import MAX_CHOICES

SUPPORTED_VLLM = "0.32.0"
# Exceptions of what is no defect: a client brings it about, or is to come back.
REFUSALS = (RouterRefused, AccessRefused, VLLMClientError)
# Of the HTTP server, called by `serve_http` as on the command line.
_SERVER_OPTIONS = (
    "enable_ssl_refresh",
    "ssl_keyfile",
    "ssl_certfile",
    "ssl_ca_certs",
    "ssl_cert_reqs",
    "ssl_ciphers",
    "h11_max_incomplete_event_size",
    "h11_max_header_count",
)


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """Options of `vllm serve`, checked by vLLM. Ends the process where they are wrong, with a sentence."""
    args = make_arg_parser(FlexibleArgumentParser(prog="rachis gateway")).parse_args(list(arguments))
    validate_parsed_serve_args(args)
    return args


def make_engine(args: argparse.Namespace, core: RouterCore) -> RouterEngine:
    engine_args = AsyncEngineArgs.from_cli_args(args)
    model_config = engine_args.create_model_config()
    # Of weights that are not here.
    model_config.quantization = None
    envs.VLLM_CPU_KVCACHE_SPACE = 0
    # Each choice is a request to a router. vLLM's own sentence names this, so it may be told otherwise.
    os.environ.setdefault("VLLM_MAX_N_SEQUENCES", str(MAX_CHOICES))
    config = VllmConfig(
        model_config=model_config,
        logging_config=engine_args.create_logging_config(),
        structured_outputs_config=engine_args.create_structured_outputs_config(),
    )
    return RouterEngine(config, core, log_stats=not args.disable_log_stats, log_requests=args.enable_log_requests)


async def make_app(
    args: argparse.Namespace, engine: RouterEngine, callers: Callable[[Any], Any] | None, max_body_bytes: int
) -> FastAPI:
    """callers: middleware that finds out who asks, before anything else is done. max_body_bytes: of a request."""
    app = FastAPI(lifespan=lifespan)
    app.state.args = args
    app.root_path = args.root_path
    register_vllm_serve_api_routers(app)
    attach_models(app)
    register_generate_api_routers(app)
    init_exception_handler(app)
    for kind in (RouterRefused, AccessRefused):
        app.exception_handler(kind)(refused)
    app.add_middleware(LateStatus, answer=refusal)
    init_entrypoints_middleware(args, app, TASKS)
    app.add_middleware(BoundedBody, max_bytes=max_body_bytes)
    if callers is not None:
        app.add_middleware(callers)
        # A page that may ask may also read why it is refused.
        cors = next(each for each in app.user_middleware if cast(Any, each.cls) is CORSMiddleware)
        app.user_middleware.remove(cors)
        app.user_middleware.insert(0, cors)
    await init_app_state(engine, app.state, args, TASKS)
    app.state.openai_serving_responses = EndedResponses(app.state.openai_serving_responses)
    app.state.anthropic_serving_messages = EndedMessages(app.state.anthropic_serving_messages, answer=refusal)
    return app


def serve_adapters(app: FastAPI, adapters: Sequence[api.ServedAdapter]) -> None:
    """From now on these are the models beside the model. Requests that run go on."""
    known = app.state.openai_serving_models.lora_requests
    # vLLM looks among adapters first: one of the model's own name here would take its requests.
    is_model = app.state.openai_serving_models.is_base_model
    wanted = {adapter.name: adapter for adapter in adapters if not is_model(adapter.name)}
    for name in known.keys() - wanted.keys():
        del known[name]
    for name, adapter in wanted.items():
        if name not in known or known[name].lora_path != adapter.path:
            known[name] = LoRARequest(name, len(known) + 1, adapter.path)


async def serve(app: FastAPI, args: argparse.Namespace, sock: Any, max_frame_bytes: int) -> None:
    """Until a signal. max_frame_bytes: of a WebSocket; a longer one ends its connection."""
    stopped = await serve_http(
        app,
        sock=sock,
        host=args.host,
        port=args.port,
        log_level=args.uvicorn_log_level,
        access_log=not args.disable_uvicorn_access_log,
        timeout_keep_alive=envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE,
        ws_max_size=max_frame_bytes,
        http=CertificateProtocol,
        # Its lines go the way of all others.
        log_config=None,
        **{name: getattr(args, name) for name in _SERVER_OPTIONS},
    )
    await stopped


def listen(args: argparse.Namespace) -> tuple[str, Any]:
    """(address as a URL, socket). Several gateways may share a port."""
    address, sock = setup_server(args, reuse_port=True)
    return address, sock


def refusal(error: Exception, path: str) -> JSONResponse:
    """An error as the API of that path says it."""
    body = create_error_response(error)
    if path.startswith("/v1/messages"):
        response: JSONResponse = translate_error_response(body)
    else:
        response = JSONResponse(body.model_dump(), status_code=body.error.code)
    response.headers.update(headers_of(error))
    return response


def refusal_of_router(error: RachisError, path: str) -> JSONResponse:
    """The same, of what a router has said."""
    return refusal(as_vllm_error(error), path)


async def refused(request: Any, error: RouterRefused | AccessRefused) -> JSONResponse:
    return refusal(error, request.url.path)
