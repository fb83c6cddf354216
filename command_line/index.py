"""`rachis index`: which prefixes are hot and who holds them, and whether the index can be believed."""

import asyncio
from typing import Annotated, Any

import typer
from rachis import AsyncClient
from rachis.v1 import admin_pb2 as admin
from rich.markup import escape

from command_line import options
from command_line.output import out, print_json, print_table, short_number
from command_line.router_admin import TIMEOUT_S, pool_name
from command_line.status.index import index_line, status_of
from control_plane.overview.complaints import first_names


def register(app: typer.Typer) -> None:
    index = typer.Typer(help="Which prefixes are hot, and who holds them.", no_args_is_help=True)
    index.command("top")(top_command)
    index.command("lookup")(lookup_command)
    index.command("check")(check_command)
    index.command("status")(status_command)
    app.add_typer(index, name="index")


def top_command(
    number: Annotated[int, typer.Option("-n", min=1, max=1000, help="So many prefixes.")] = 20,
    address: options.Address = None,
    as_json: options.AsJson = False,
) -> None:
    """The prefixes that requests share most, and who holds them."""
    asyncio.run(top(options.admin_address(address), number, as_json=as_json))


def lookup_command(
    prompt: options.Prompt = None,
    chat: options.Chat = False,
    tokens: options.Tokens = None,
    model: options.AskedModel = "",
    cache_salt: options.CacheSalt = "",
    address: options.Address = None,
    as_json: options.AsJson = False,
) -> None:
    """What of a prompt lies where, how hot it is, and who would get it now."""
    given = options.prompt_input(prompt, chat=chat, tokens=tokens)
    request = admin.LookupPrefixRequest(prompt=given, cache_salt=cache_salt, model=model)
    asyncio.run(lookup(options.admin_address(address), request, as_json=as_json))


def check_command(address: options.Address = None, as_json: options.AsJson = False) -> None:
    """Compare the index with the workers' own block pools.

    The exit code is 1 when it claims what is not there, and when no worker could be compared.
    """
    raise typer.Exit(asyncio.run(check(options.admin_address(address), as_json=as_json)))


def status_command(address: options.Address = None, as_json: options.AsJson = False) -> None:
    """How large the index is, and how far it follows each worker."""
    asyncio.run(index_status(options.admin_address(address), as_json=as_json))


async def top(address: str, at_most: int, *, as_json: bool) -> None:
    async with AsyncClient(address) as client:
        response = await client.admin.GetHottestPrefixes(
            admin.GetHottestPrefixesRequest(at_most=at_most), timeout=TIMEOUT_S
        )
    prefixes: list[dict[str, Any]] = [
        {
            "name": prefix.name,
            "tokens": prefix.tokens,
            "requests_per_s": prefix.requests_per_s,
            "device_workers": list(prefix.device_workers),
            "host_workers": list(prefix.host_workers),
        }
        for prefix in response.prefixes
    ]
    if as_json:
        print_json({"prefixes": prefixes})
    elif not prefixes:
        out.print("no prompt of a chunk or more has been asked for yet")
    else:
        rows = [
            (
                prefix["name"],
                short_number(prefix["tokens"]),
                _rate(prefix["requests_per_s"]),
                first_names(prefix["device_workers"]),
                first_names(prefix["host_workers"]),
            )
            for prefix in prefixes
        ]
        print_table("", ("prefix", "tokens", "requests/s", "on the device of", "in host memory of"), rows)


async def lookup(address: str, request: admin.LookupPrefixRequest, *, as_json: bool) -> None:
    async with AsyncClient(address) as client:
        found = await client.admin.LookupPrefix(request, timeout=TIMEOUT_S)
    result = {
        "prompt_tokens": found.prompt_tokens,
        "chunks": found.chunks,
        "chunk_tokens": found.chunk_tokens,
        "requests_per_s": {"first_chunk": found.first_requests_per_s, "whole": found.whole_requests_per_s},
        "workers": [
            {
                "worker_id": holder.worker_id,
                "pool": pool_name(holder.pool),
                "generation": holder.generation,
                "in_index": holder.in_index,
                "device_tokens": holder.device_tokens,
                "predicted_tokens": holder.predicted_tokens,
                "host_tokens": holder.host_tokens,
            }
            for holder in found.workers
        ],
        "choices": [
            {
                "pool": pool_name(choice.pool),
                "worker_id": choice.worker_id or None,
                "policy": choice.policy,
                "equals": choice.equals,
            }
            for choice in found.choices
        ],
    }
    if as_json:
        print_json(result)
    else:
        _print_lookup(result)


async def check(address: str, *, as_json: bool) -> int:
    """Returns 1 when the index claims what is not there, and when no worker could be compared."""
    async with AsyncClient(address) as client:
        checked = await client.admin.CheckIndex(admin.CheckIndexRequest(), timeout=TIMEOUT_S)
    workers = [_check_of(worker) for worker in checked.workers]
    untrue = sum(worker[tier]["untrue"] for worker in workers if not worker["error"] for tier in ("device", "host"))
    result = {
        "untrue": untrue,
        "unanswered": sum(bool(worker["error"]) for worker in workers),
        "took_s": round(checked.took_s, 3),
        "workers": workers,
    }
    if as_json:
        print_json(result)
    else:
        _print_check(result)
    return 1 if untrue or result["unanswered"] == len(workers) else 0


async def index_status(address: str, *, as_json: bool) -> None:
    async with AsyncClient(address) as client:
        status = status_of(await client.admin.GetIndexStatus(admin.GetIndexStatusRequest(), timeout=TIMEOUT_S))
    if as_json:
        print_json(status)
        return
    out.print(index_line(status), markup=False)
    for alarm in status["alarms"]:
        out.print(f"[bold]{escape(alarm)}[/bold]")
    counts = status["counts"]
    out.print(
        f"since the start: {counts['batches']} batches with {counts['keys']} chunks, {counts['duplicates']} twice, "
        f"{counts['gaps']} gaps, {counts['resyncs']} snapshots, {counts['damaged']} damaged; "
        f"{status['load_only_decisions']} placements by load alone"
    )
    if status["disaggregation"]:
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(status["disaggregation"].items()))
        out.print(f"disaggregation: {reasons}")
    rows = [
        (
            worker["worker_id"],
            worker["generation"],
            worker["sequence"],
            worker["lag_batches"],
            _yes(worker["in_sync"]),
            _yes(worker["silent"]),
        )
        for worker in status["workers"]
    ]
    print_table("", ("worker", "generation", "batch", "behind", "in sync", "silent"), rows)


def _print_lookup(result: dict[str, Any]) -> None:
    tokens, chunks, chunk_tokens = result["prompt_tokens"], result["chunks"], result["chunk_tokens"]
    if not chunks:
        out.print(f"{tokens} tokens, less than one chunk of {chunk_tokens}: the index knows nothing of such prompts")
    else:
        rates = result["requests_per_s"]
        out.print(
            f"{tokens} tokens, {chunks} chunks of {chunk_tokens}; {_rate(rates['whole'])} requests/s ask for all of "
            f"them, {_rate(rates['first_chunk'])} for the first"
        )
    rows = [
        (
            holder["worker_id"],
            holder["pool"],
            holder["generation"],
            *(
                (holder["device_tokens"], holder["predicted_tokens"], holder["host_tokens"])
                if holder["in_index"]
                else ("not in the index", "", "")
            ),
        )
        for holder in result["workers"]
    ]
    print_table("", ("worker", "pool", "generation", "on the device", "predicted", "in host memory"), rows)
    for choice in result["choices"]:
        if choice["worker_id"] is None:
            refuses = choice["policy"] == "objectives"
            out.print(f"the {choice['pool']} pool {'would refuse it' if refuses else 'has nobody who may get it'} now")
            continue
        drawn = f", drawn from {choice['equals']} equals" if choice["equals"] > 1 else ""
        out.print(f"the {choice['pool']} pool would choose {choice['worker_id']} now ({choice['policy']}{drawn})")


def _check_of(worker: admin.WorkerCheck) -> dict[str, Any]:
    checked: dict[str, Any] = {
        "worker_id": worker.worker_id,
        "pool": pool_name(worker.pool),
        "error": worker.error or None,
    }
    if worker.error:
        return checked
    return {
        **checked,
        "index_generation": worker.index_generation,
        "generation": worker.generation,
        "device": _tier_of(worker.device),
        "host": _tier_of(worker.host),
        "after_s": round(worker.after_s, 3),
    }


def _tier_of(tier: admin.TierCheck) -> dict[str, Any]:
    return {
        "agreed": tier.agreed,
        "missing": tier.missing,
        "untrue": tier.untrue,
        "untrue_names": list(tier.untrue_names),
    }


def _print_check(result: dict[str, Any]) -> None:
    rows = [
        (
            worker["worker_id"],
            tier,
            worker[tier]["agreed"],
            worker[tier]["missing"],
            worker[tier]["untrue"],
            ", ".join(worker[tier]["untrue_names"]),
            f"{worker['after_s']:.2f} s",
        )
        for worker in result["workers"]
        if not worker["error"]
        for tier in ("device", "host")
    ]
    if rows:
        columns = ("worker", "tier", "in both", "missing", "untrue", "untrue ones", "after")
        print_table("chunks that the index claims, and that lie in the engines' block pools", columns, rows)
    for worker in result["workers"]:
        if worker["error"]:
            out.print(f"{worker['worker_id']} could not be compared: {worker['error']}", markup=False)
        elif worker["generation"] != worker["index_generation"]:
            out.print(
                f"{worker['worker_id']} has been started again as generation {worker['generation']}, "
                f"the index has claims of {worker['index_generation'] or 'none'}"
            )
    if result["untrue"]:
        out.print(f"[bold]{result['untrue']} claims are untrue[/bold]")
    elif not rows:
        out.print("[bold]no worker could be compared[/bold]")
    else:
        out.print("no claim is untrue" if not result["unanswered"] else "no claim of the others is untrue")


def _rate(per_second: float) -> str:
    return f"{per_second:.3g}"


def _yes(value: bool) -> str:
    return "yes" if value else "no"
