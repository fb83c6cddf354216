"""`rachis placement explain`: every candidate, every term, the winner, and why a request was disaggregated or not."""

import asyncio
from typing import Annotated, Any

import typer
from rachis import AsyncClient
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import generation_pb2 as generation

from cluster_core.errors import ConfigError
from command_line import options
from command_line.output import out, print_json, print_table, short_number
from command_line.router_admin import TIMEOUT_S, pool_name
from control_plane.model.limits import DEFAULT_MAX_TOKENS

# What each reason means to people; the names are those of `control_plane.placement.disaggregation.Reason`.
REASONS = {
    "always": "disaggregated, as configured",
    "remote_sooner": "disaggregated: a prefill worker is expected to be sooner",
    "long_remainder": "disaggregated: what is not cached is more than a decode worker may prefill",
    "short_remainder": "prefilled by the decode worker: little is left to compute, and it is expected to be sooner",
    "prefill_slow": "prefilled by the decode worker: the prefill pool would take more than twice as long",
    "prefill_down": "prefilled by the decode worker: no prefill worker is usable",
    "decode_down": "prefilled by a prefill worker: no decode worker was usable then",
    "session": "disaggregated: its prompt was still arriving",
    "whole": "prefilled where it decodes: workers do both",
    "append": "prefilled and decoded where most of its prompt lies",
    "apart": "prefilled apart, and bound to a worker for decode at its first token",
    "refused": "refused: no worker was expected to have its first token in time",
    "refused_for_tpot": "refused: no worker was expected to keep TPOT with one request more",
}


def register(app: typer.Typer) -> None:
    placement = typer.Typer(help="Why requests go where they go.", no_args_is_help=True)
    placement.command("explain")(explain_command)
    app.add_typer(placement, name="placement")


def explain_command(
    request_id: Annotated[str | None, typer.Argument(help="Of a request of late; see `rachis generate`.")] = None,
    prompt: Annotated[str | None, typer.Option(help="Instead: a prompt that is not sent; - reads it.")] = None,
    chat: options.Chat = False,
    tokens: options.Tokens = None,
    max_tokens: Annotated[int, typer.Option(help="Of the completion that is not asked for.")] = DEFAULT_MAX_TOKENS,
    model: options.AskedModel = "",
    cache_salt: options.CacheSalt = "",
    address: options.Address = None,
    as_json: options.AsJson = False,
) -> None:
    """Why a request went where it went: every candidate, every term. Or where one would go now."""
    is_supposed = prompt is not None or tokens is not None
    if (request_id is not None) == is_supposed:
        raise ConfigError("give either the id of a request, or --prompt or --tokens", field="REQUEST_ID")
    if request_id is not None:
        request = admin.ExplainPlacementRequest(request_id=request_id)
    else:
        request = supposed(
            options.prompt_input(prompt, chat=chat, tokens=tokens),
            cache_salt,
            model,
            options.whole_number(max_tokens, "--max-tokens"),
        )
    asyncio.run(explain(options.admin_address(address), request, as_json=as_json))


def supposed(
    prompt: generation.PromptInput, cache_salt: str, model: str, max_tokens: int
) -> admin.ExplainPlacementRequest:
    """Asks where a request would go that is not sent."""
    request = admin.SupposedRequest(prompt=prompt, cache_salt=cache_salt, model=model, max_tokens=max_tokens)
    return admin.ExplainPlacementRequest(supposed=request)


async def explain(address: str, request: admin.ExplainPlacementRequest, *, as_json: bool) -> None:
    async with AsyncClient(address) as client:
        explained = explanation_of(await client.admin.ExplainPlacement(request, timeout=TIMEOUT_S))
    if as_json:
        print_json(explained)
    else:
        print_explanation(explained)


def explanation_of(explained: admin.ExplainPlacementResponse) -> dict[str, Any]:
    """For `--json`."""
    prices = explained.prices
    return {
        "request_id": explained.request_id or None,
        "disaggregation": explained.disaggregation or None,
        "prices": {
            "local_s": prices.local_s,
            "remote_s": prices.remote_s,
            "remainder_tokens": prices.remainder_tokens,
        }
        if explained.HasField("prices")
        else None,
        "decisions": [_decision_of(decision) for decision in explained.decisions],
        "ways": [
            {
                "worker_id": way.worker_id,
                "way": way.way,
                "ttft_s": way.ttft_s,
                "step_s": way.step_s,
                "missed": way.missed,
                "cost_s": way.cost_s,
            }
            for way in explained.ways
        ],
        "worker_id": explained.worker_id or None,
        "bound_worker_id": explained.bound_worker_id or None,
    }


def print_explanation(explained: dict[str, Any]) -> None:
    """Of what `explanation_of` gives."""
    if explained["disaggregation"] is not None:
        out.print(_disaggregation(explained))
    if not (explained["decisions"] or explained["ways"]):
        out.print("it has not been placed yet")
    _print_ways(explained["ways"])
    if explained["worker_id"] is not None:
        out.print(f"went to {explained['worker_id']}")
    if explained["bound_worker_id"] is not None:
        out.print(f"decoded by {explained['bound_worker_id']}")
    for decision in explained["decisions"]:
        _print_decision(decision)


def _disaggregation(explained: dict[str, Any]) -> str:
    reason, prices = explained["disaggregation"], explained["prices"]
    sentence = f"{reason}: {REASONS.get(reason, 'see docs/placement.md')}"
    if prices is None:
        return sentence
    return (
        f"{sentence}; {_seconds(prices['local_s'])} by itself for {prices['remainder_tokens']} tokens, "
        f"{_seconds(prices['remote_s'])} disaggregated"
    )


def _print_ways(ways: list[dict[str, Any]]) -> None:
    """By the objectives: the first has the fewest objectives missed, and of those the least cost."""
    rows = [
        (
            way["worker_id"],
            way["way"],
            _seconds(way["ttft_s"]),
            _seconds(way["step_s"]),
            way["missed"],
            _seconds(way["cost_s"]),
        )
        for way in ways
    ]
    if rows:
        print_table("", ("worker", "way", "expected TTFT", "step", "missed", "cost"), rows)


def _print_decision(decision: dict[str, Any]) -> None:
    out.print(_title(decision))
    names = [term["name"] for term in decision["terms"]]
    if names:
        out.print("score = " + " + ".join(f"{term['weight']:g} {term['name']}" for term in decision["terms"]))
    # Prefixes that run decide on decode, queues on prefill.
    is_prefill = decision["pool"] == "prefill"
    rows = [
        (
            candidate["worker_id"],
            f"{candidate['score']:.3f}" if candidate["passed"] else "left out",
            *(f"{candidate['terms'][name]:.3f}" for name in names),
            short_number(candidate["device_tokens"]),
            short_number(candidate["host_tokens"]),
            candidate["in_flight_requests"],
            _seconds(candidate["queue_s"]) if is_prefill else _shared(candidate),
        )
        for candidate in decision["candidates"]
    ]
    if rows:
        last = "queue" if is_prefill else "shared"
        print_table("", ("worker", "score", *names, "device", "host", "in flight", last), rows)


def _shared(candidate: dict[str, Any]) -> str:
    """Tokens, and with how many requests."""
    return f"{short_number(candidate['shared_tokens'])} x {candidate['sharers']}" if candidate["sharers"] else "-"


def _title(decision: dict[str, Any]) -> str:
    policy = decision["policy"]
    if decision["load_only"]:
        policy += ", as the index was stale"
    request = f"{decision['prompt_tokens']} prompt tokens and at most {decision['max_tokens']} more"
    if not decision["candidates"]:
        return f"\n{decision['pool']}: no worker was usable for {request}"
    if decision["worker_id"] is None:
        return f"\n{decision['pool']}: every worker had failed the request, {request}"
    drawn = f", drawn from {decision['equals']} equals" if decision["equals"] > 1 else ""
    return f"\n{decision['pool']}: {decision['worker_id']} by {policy}{drawn}, for {request}"


def _decision_of(decision: admin.PlacementDecision) -> dict[str, Any]:
    return {
        "pool": pool_name(decision.pool),
        "policy": decision.policy,
        "load_only": decision.load_only,
        "worker_id": decision.worker_id or None,
        "equals": decision.equals,
        "prompt_tokens": decision.prompt_tokens,
        "max_tokens": decision.max_tokens,
        "terms": [{"name": term.name, "weight": term.weight} for term in decision.terms],
        "candidates": [
            {
                "worker_id": candidate.worker_id,
                "generation": candidate.generation,
                "passed": candidate.passed,
                "score": candidate.score,
                "terms": dict(candidate.terms),
                "device_tokens": candidate.device_tokens,
                "host_tokens": candidate.host_tokens,
                "shared_tokens": candidate.shared_tokens,
                "sharers": candidate.sharers,
                "in_flight_requests": candidate.in_flight_requests,
                "in_flight_tokens": candidate.in_flight_tokens,
                "queue_s": candidate.queue_s,
            }
            for candidate in decision.candidates
        ],
    }


def _seconds(value: float) -> str:
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"
