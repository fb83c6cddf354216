"""The options of `rachis bench serve`; serve_run.py does the work."""

import asyncio
from typing import Annotated

import typer

from command_line import options


def register(bench: typer.Typer) -> None:
    bench.command(
        "serve",
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )(serve_command)


def serve_command(
    context: typer.Context,
    backends: Annotated[
        list[str] | None,
        typer.Option(
            "--backend",
            help="openai, openai-chat, openai-responses, rachis, rachis-session; several are compared.",
        ),
    ] = None,
    base_url: Annotated[str, typer.Option(help="Any service with OpenAI's APIs.")] = "http://127.0.0.1:8000",
    address: options.Addresses = None,
    pieces: Annotated[int, typer.Option(min=1, max=1000, help="In which each prompt comes.")] = 1,
    piece_interval_ms: Annotated[float, typer.Option(min=0.0, max=60_000.0, help="From one piece to the next.")] = 0.0,
    as_json: options.AsJson = False,
) -> None:
    """vLLM's own benchmark, against any service with OpenAI's APIs and against this one over gRPC.

    Options that are not listed here are those of vLLM's benchmark, such as --dataset-name, --dataset-path, --seed,
    --num-prompts, --request-rate, --max-concurrency, --random-input-len, --random-output-len, --model, --tokenizer.
    Prompts in pieces: rachis-session computes what has come, the others are asked once the last piece is there; times
    count from then.
    """
    from command_line.bench import serve_run

    asked = serve_run.Asked(
        backends=backends or ["openai", "rachis", "rachis-session"],
        base_url=base_url.rstrip("/"),
        address=address,
        pieces=pieces,
        piece_interval_s=piece_interval_ms / 1000,
    )
    asyncio.run(serve_run.bench_serve(asked, context.args, as_json=as_json))
