"""`rachis bench serve`: vLLM's benchmark over several back ends, one after the other, each beside the first."""

import argparse
import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn
from unittest import mock

import httpx
from rachis import AsyncClient

from benchmarks.serve_backends import PLAIN, SESSION, Pieces, request_functions
from cluster_configs.schema import ModelSection
from cluster_core.errors import ConfigError, UnavailableError
from command_line import options
from command_line.output import err, out, print_json, print_table, times_text

_ENDPOINTS = {
    "openai": "/v1/completions",
    "vllm": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
    "openai-responses": "/v1/responses",
}
_OURS = (PLAIN, SESSION)
# Of vLLM's result: what the table shows, and whether more is better.
_FIGURES = (
    ("completed", "completed"),
    ("failed", "failed"),
    ("request_throughput", "requests/s"),
    ("output_throughput", "tokens/s"),
    *(
        (f"{which}_{name}_ms", f"{name.upper()} {label}")
        for name in ("ttft", "tpot", "itl")
        for which, label in (("median", "P50"), ("p90", "P90"), ("p99", "P99"))
    ),
)
_TIMEOUT_S = 10.0
# For the first request of all to be answered, which is tried again until then.
_READY_S = 15


@dataclass(frozen=True, slots=True)
class Asked:
    """address: of the routers, None for the service that runs here."""

    backends: Sequence[str]
    base_url: str
    address: str | None
    pieces: int
    piece_interval_s: float


async def bench_serve(asked: Asked, more: list[str], *, as_json: bool) -> None:
    """Raises ConfigError naming the option, UnavailableError where nobody answers."""
    unknown = [name for name in asked.backends if name not in (*_ENDPOINTS, *_OURS)]
    if unknown:
        raise ConfigError(f"{unknown[0]} is none of {', '.join((*_ENDPOINTS, *_OURS))}", field="--backend")
    results: dict[str, dict[str, Any]] = {}
    async with contextlib.AsyncExitStack() as held:
        client = None
        if any(name in _OURS for name in asked.backends):
            client = await held.enter_async_context(AsyncClient(options.running_address(asked.address)))
        model = await _model(asked, client)
        pieces = Pieces(asked.pieces, asked.piece_interval_s)
        for number, name in enumerate(asked.backends):
            arguments = _arguments(name, asked.base_url, model, more)
            # Others of the same kind: what the back end before has cached is of no use.
            arguments.seed += number
            if not as_json:
                err.print(f"[bold]{name}[/bold]")
            results[name] = await _measured(arguments, client, pieces)
    _tell(asked, results, as_json=as_json)


async def _measured(arguments: argparse.Namespace, client: AsyncClient | None, pieces: Pieces) -> dict[str, Any]:
    from vllm.benchmarks import serve

    functions = request_functions(client, pieces)
    kinds = [*serve.OPENAI_COMPATIBLE_BACKENDS, *_OURS]
    with (
        mock.patch.object(serve, "ASYNC_REQUEST_FUNCS", functions),
        mock.patch.object(serve, "OPENAI_COMPATIBLE_BACKENDS", kinds),
        # What it says to people is said in one table.
        contextlib.redirect_stdout(io.StringIO()),
    ):
        try:
            result: dict[str, Any] = await serve.main_async(arguments)
        except (ValueError, OSError) as error:
            raise ConfigError(str(error), field="rachis bench serve") from None
    return {name: result[name] for name, _ in _FIGURES if name in result}


def _arguments(backend: str, base_url: str, model: tuple[str, str], more: list[str]) -> argparse.Namespace:
    """As vLLM's own command line has them. Raises ConfigError."""
    from vllm.benchmarks.serve import add_cli_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]  # has no types
        def error(self, message: str) -> NoReturn:
            raise ConfigError(message, field="rachis bench serve")

    parser = Parser(add_help=False)
    add_cli_args(parser)
    name, root = model
    parser.set_defaults(
        dataset_name="random",
        model=root,
        served_model_name=name,
        temperature=0.0,
        metric_percentiles="50,90,99",
        ready_check_timeout_sec=_READY_S,
    )
    parsed: argparse.Namespace = parser.parse_args(more)
    parsed.backend, parsed.base_url, parsed.endpoint = backend, base_url, _ENDPOINTS.get(backend, "")
    return parsed


async def _model(asked: Asked, client: AsyncClient | None) -> tuple[str, str]:
    """Its name, and where its tokenizer is: of the HTTP service where one is asked, else of ours."""
    if all(name in _OURS for name in asked.backends):
        assert client is not None
        model = (await client.models()).model
        return model.name, ModelSection(path=model.tokenizer).resolved_path
    try:
        async with httpx.AsyncClient(timeout=_TIMEOUT_S) as http:
            answer = await http.get(f"{asked.base_url}/v1/models")
            answer.raise_for_status()
            found = answer.json()["data"][0]
            return str(found["id"]), str(found.get("root") or found["id"])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, IndexError) as error:
        raise UnavailableError(
            f"{asked.base_url}/v1/models does not say what is served: {error or type(error).__name__}",
            field="--base-url",
        ) from None


def _tell(asked: Asked, results: dict[str, dict[str, Any]], *, as_json: bool) -> None:
    first, *others = asked.backends
    ratios = {
        name: {figure: _ratio(results[name], results[first], figure) for figure, _ in _FIGURES} for name in others
    }
    if as_json:
        print_json({"pieces": asked.pieces, "backends": results, "ratios": ratios})
        return
    columns = [name for backend in asked.backends for name in ([backend] if backend == first else [backend, "ratio"])]
    rows = []
    for figure, label in _FIGURES:
        if figure not in results[first]:
            continue
        cells = [_shown(results[first], figure)]
        for name in others:
            cells += [_shown(results[name], figure), times_text(ratios[name][figure])]
        rows.append((label, *cells))
    print_table("", ("ms, from the last piece of a prompt", *columns), rows)
    if asked.pieces > 1:
        out.print(f"{asked.pieces} pieces, {asked.piece_interval_s * 1000:g} ms from one to the next")


def _ratio(one: dict[str, Any], other: dict[str, Any], figure: str) -> float | None:
    if figure in ("completed", "failed") or not other.get(figure):
        return None
    return float(one[figure]) / float(other[figure])


def _shown(result: dict[str, Any], figure: str) -> str:
    value = result.get(figure, "-")
    return f"{value:.2f}" if isinstance(value, float) else str(value)
