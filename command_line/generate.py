"""`rachis generate`: one prompt, streamed to the terminal."""

import asyncio
from typing import Annotated, Any

import typer
from rachis import AsyncClient, Generated
from rachis.v1 import generation_pb2 as generation
from rich.markup import escape

from cluster_core.ids import new_request_id
from command_line import options
from command_line.output import err, out, print_json
from control_plane.intake.validation import MAX_CHOICES
from control_plane.model.limits import MAX_PRIORITY


def register(app: typer.Typer) -> None:
    app.command("generate")(generate_command)


def generate_command(
    prompt: options.Prompt = None,
    chat: options.Chat = False,
    tokens: options.Tokens = None,
    max_tokens: int = 128,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    seed: int | None = None,
    stop: Annotated[list[str] | None, typer.Option(help="Ends generation; may be given several times.")] = None,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    repetition_penalty: float = 1.0,
    logprobs: int | None = None,
    model: options.AskedModel = "",
    cache_salt: options.CacheSalt = "",
    priority: Annotated[
        int, typer.Option(min=-MAX_PRIORITY, max=MAX_PRIORITY, help="Decode workers admit the lowest first.")
    ] = 0,
    choices: Annotated[
        int,
        typer.Option("-n", "--choices", min=1, max=MAX_CHOICES, help="Answers; with a seed each has the next."),
    ] = 1,
    timeout_s: float = 600.0,
    request_id: Annotated[
        str, typer.Option(help="Your name for it, for `rachis placement explain`; one is made by default.")
    ] = "",
    address: options.Addresses = None,
    as_json: options.AsJson = False,
) -> None:
    """Send one prompt to a running service and stream the answer."""
    sampling: dict[str, Any] = {
        "max_tokens": options.whole_number(max_tokens, "--max-tokens"),
        "temperature": temperature,
        "top_p": top_p,
        "top_k": options.whole_number(top_k, "--top-k"),
        "min_p": min_p,
        "stop": stop or [],
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "repetition_penalty": repetition_penalty,
        "model": model,
        "cache_salt": cache_salt,
        "priority": priority,
    }
    if seed is not None:
        sampling["seed"] = options.whole_number(seed, "--seed", options.UINT64)
    if logprobs is not None:
        sampling["logprobs"] = options.whole_number(logprobs, "--logprobs")
    given = options.prompt_input(prompt, chat=chat, tokens=tokens)
    name = request_id or new_request_id()
    where = options.running_address(address)
    if choices > 1:
        asyncio.run(
            generate_choices(where, given, choices, sampling, request_id=name, timeout_s=timeout_s, as_json=as_json)
        )
        return
    asyncio.run(generate(where, given, sampling, request_id=name, timeout_s=timeout_s, as_json=as_json))


async def generate(
    address: str,
    prompt: generation.PromptInput,
    sampling: dict[str, Any],
    *,
    request_id: str,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Streams the completion; with `as_json` prints it whole."""
    generated = Generated()
    async with AsyncClient(address) as client:
        async for piece in client.stream(prompt, request_id=request_id, timeout_s=timeout_s, **sampling):
            if isinstance(piece, generation.Completion):
                generated.completion = piece
                continue
            generated.add(piece)
            if not as_json:
                out.print(piece.text, end="", markup=False)
    if as_json:
        print_json({"request_id": request_id, **as_table(generated)})
        return
    out.print()
    err.print(summary(generated.completion))
    err.print(f"[dim]request {escape(request_id)}[/dim]")


async def generate_choices(
    address: str,
    prompt: generation.PromptInput,
    choices: int,
    sampling: dict[str, Any],
    *,
    request_id: str,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Prints several completions, each whole: they come in turns."""
    async with AsyncClient(address) as client:
        found = await client.generate_choices(prompt, choices, request_id=request_id, timeout_s=timeout_s, **sampling)
    if as_json:
        print_json({"request_id": request_id, "choices": [as_table(generated) for generated in found]})
        return
    for number, generated in enumerate(found):
        out.print(f"[bold]{number}[/bold] ", end="")
        out.print(generated.text, markup=False)
        err.print(summary(generated.completion))
    err.print(f"[dim]request {escape(request_id)}[/dim]")


def summary(completion: generation.Completion) -> str:
    """One line about a completion, for people."""
    usage, timings, route = completion.usage, completion.timings, completion.route
    places = f"prefilled by {route.prefill_worker_id or route.decode_worker_id}"
    if route.decode_worker_id:
        places += f", decoded by {route.decode_worker_id}"
    return (
        f"[dim]{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached), "
        f"{usage.completion_tokens} generated; "
        f"{places}, {route.kv_bytes} KV bytes over NIXL in {route.kv_descriptors} reads; "
        f"first token after {timings.ttft_ms:.0f} ms, transfer {timings.transfer_ms:.0f} ms, "
        f"decode {timings.decode_ms:.0f} ms[/dim]"
    )


def as_table(generated: Generated) -> dict[str, Any]:
    """A completion as one JSON-ready table."""
    done = generated.completion
    usage, timings, route = done.usage, done.timings, done.route
    table: dict[str, Any] = {
        "text": generated.text,
        "token_ids": generated.token_ids,
        "finish_reason": _name(generation.FinishReason, done.finish_reason, "FINISH_REASON_"),
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
        },
        "timings_ms": {
            name: round(getattr(timings, f"{name}_ms"), 3)
            for name in ("queue", "prefill", "transfer", "decode", "ttft")
        },
        "route": {
            "prefill_worker": route.prefill_worker_id,
            "decode_worker": route.decode_worker_id,
            "handoff": _name(generation.HandoffOutcome, route.handoff, "HANDOFF_OUTCOME_"),
            "kv_bytes": route.kv_bytes,
            "kv_descriptors": route.kv_descriptors,
            "pulled_tokens": route.pulled_tokens,
            "migrations": route.migrations,
            "resumed_tokens": route.resumed_tokens,
        },
    }
    if generated.logprobs:
        table["logprobs"] = [
            {
                "token_id": row.sampled.token_id,
                "logprob": row.sampled.logprob,
                "rank": row.sampled.rank,
                "top": {entry.token_id: entry.logprob for entry in row.top},
            }
            for row in generated.logprobs
        ]
    return table


def _name(enumeration: Any, value: int, prefix: str) -> str:
    return str(enumeration.Name(value)).removeprefix(prefix).lower()
