"""What tenants find out about each other by time, what one can take from another, and what keys and TLS cost.

All of it on one service with several routers, whose settings alone differ:

    never, always    two tenants ask in turn; whether the second one's time to first token tells what the first one has
                     asked: with `security.sharing: never` it must not, with `always` it does, as a control
    shares           a tenant with requests at random times, alone and beside one that asks for ten times its share,
                     with prompts as long as its own and five times as long: routers share slots, engines their steps
    keyed, plain     with keys and TLS, and with neither: pairs of requests to these two, neither of which has anything
                     else to do, as the service's own router has
    rated            keys, TLS and rates that nobody reaches: pairs of requests to this router and to `keyed`
"""

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np
from rachis import AsyncClient, token_prompt

from benchmarks.two_sample import ks_test
from cluster_core.clock import monotonic_s

Say = Callable[[str], None]
# By the name of a router, and of a tenant.
Clients = Mapping[tuple[str, str], AsyncClient]

_GREEDY = {"temperature": 0.0, "ignore_eos": True}
_PROMPT_TOKENS = 600
_LONG_PROMPT_TOKENS = 3000
_VOCABULARY = 250
# Slots of the router at which shares are measured; tenants may have half of them.
SLOTS = 16
_OUTSTANDING = 10 * SLOTS // 2
_ANSWER_TOKENS = 16
_VICTIM_PER_S = 4.0


@dataclass(slots=True)
class TenantsReport:
    """Ratios are of P90 or P50 of the time to first token."""

    requests: int
    timing_p_value_never: float = 0.0
    timing_p_value_always: float = 0.0
    statistic_never: float = 0.0
    statistic_always: float = 0.0
    cached_tokens_never: int = 0
    victim_requests: int = 0
    victim_p90_alone_ms: float = 0.0
    victim_p90_ratio: float = 0.0
    # The other one's requests as the victim's own: who waits longest is next.
    victim_p90_ratio_without_shares: float = 0.0
    victim_p90_ratio_beside_long_prompts: float = 0.0
    tls_ttft_ratio: float = 0.0
    tls_router_cpu_ratio: float = 0.0
    rates_ttft_ratio: float = 0.0
    rates_router_cpu_ratio: float = 0.0
    failures: list[str] = field(default_factory=list)


async def measure(clients: Clients, requests: int, victim_requests: int, pairs: int, say: Say) -> TenantsReport:
    """clients: of each router above (`never` is the service's own), for tenants `acme` and `zeta` and for `ops`."""
    report, rng = TenantsReport(requests), random.Random(0)
    for sharing in ("never", "always"):
        say(f"{requests} requests of a tenant for what another one has or has not asked, sharing {sharing}")
        statistic, p_value, cached = await _timing(clients, sharing, requests // 2, rng)
        setattr(report, f"timing_p_value_{sharing}", p_value)
        setattr(report, f"statistic_{sharing}", statistic)
        if sharing == "never":
            report.cached_tokens_never = cached
    say(f"a tenant with {victim_requests} requests, alone and beside one that has {_OUTSTANDING} at all times")
    await _shares(clients, victim_requests, rng, report)
    say(f"{pairs} pairs of requests with keys and TLS and without, and as many with rates and without")
    report.tls_ttft_ratio, report.tls_router_cpu_ratio = await _cost(clients, ("keyed", "plain"), pairs, rng)
    report.rates_ttft_ratio, report.rates_router_cpu_ratio = await _cost(clients, ("rated", "keyed"), pairs, rng)
    return report


async def _timing(clients: Clients, sharing: str, pairs: int, rng: random.Random) -> tuple[float, float, int]:
    """(statistic, p-value, cached tokens that the second tenant was told of)"""
    first, second = clients[sharing, "acme"], clients[sharing, "zeta"]
    asked_s: dict[bool, list[float]] = {True: [], False: []}
    cached = 0
    for _ in range(pairs):
        known, unknown = _prompt(rng), _prompt(rng)
        await _ttft_s(first, known)
        for was_asked in rng.sample([True, False], 2):
            ttft_s, tokens = await _ttft_s(second, known if was_asked else unknown)
            asked_s[was_asked].append(ttft_s)
            cached += tokens
    return *ks_test(asked_s[True], asked_s[False]), cached


async def _shares(clients: Clients, requests: int, rng: random.Random, report: TenantsReport) -> None:
    victim = clients["shares", "zeta"]
    alone = await _at_random_times(victim, requests, rng)
    ratios = []
    for tenant, tokens in (("acme", _PROMPT_TOKENS), ("zeta", _PROMPT_TOKENS), ("acme", _LONG_PROMPT_TOKENS)):
        other = clients["shares", tenant]
        flood = [asyncio.create_task(_ask_on(other, rng.randrange(1 << 30), tokens)) for _ in range(_OUTSTANDING)]
        try:
            # Until it has all that it gets.
            await asyncio.sleep(2.0)
            beside = await _at_random_times(victim, requests, rng)
        finally:
            for task in flood:
                task.cancel()
            ended = await asyncio.gather(*flood, return_exceptions=True)
        report.failures += [str(each) for each in ended if isinstance(each, Exception)]
        ratios.append(_p90(beside) / _p90(alone))
    report.victim_requests, report.victim_p90_alone_ms = requests, 1000 * _p90(alone)
    report.victim_p90_ratio, report.victim_p90_ratio_without_shares = ratios[:2]
    report.victim_p90_ratio_beside_long_prompts = ratios[2]


async def _cost(clients: Clients, names: tuple[str, str], pairs: int, rng: random.Random) -> tuple[float, float]:
    """(P50 of TTFT, CPU of the router) at the first router as parts of those at the second."""
    ttfts_s: dict[str, list[float]] = {name: [] for name in names}
    before = {name: await _cpu_s(clients, name) for name in names}
    for _ in range(pairs):
        for name in rng.sample(names, 2):
            ttfts_s[name].append((await _ttft_s(clients[name, "acme"], _prompt(rng)))[0])
    used = {name: await _cpu_s(clients, name) - before[name] for name in names}
    first, second = names
    return median(ttfts_s[first]) / median(ttfts_s[second]), used[first] / used[second]


async def _cpu_s(clients: Clients, router: str) -> float:
    return (await clients[router, "ops"].router_status()).cpu_s


async def _at_random_times(client: AsyncClient, requests: int, rng: random.Random) -> list[float]:
    """TTFTs of requests that come as a Poisson process."""

    async def one() -> float:
        return (await _ttft_s(client, _prompt(rng), max_tokens=_ANSWER_TOKENS))[0]

    asked = []
    for _ in range(requests):
        asked.append(asyncio.create_task(one()))
        await asyncio.sleep(rng.expovariate(_VICTIM_PER_S))
    return await asyncio.gather(*asked)


async def _ask_on(client: AsyncClient, seed: int, tokens: int) -> None:
    rng = random.Random(seed)
    while True:
        await client.generate(token_prompt(_prompt(rng, tokens)), max_tokens=_ANSWER_TOKENS, **_GREEDY)


async def _ttft_s(client: AsyncClient, prompt: Sequence[int], max_tokens: int = 1) -> tuple[float, int]:
    """(seconds, cached tokens that the answer tells of)"""
    began_s, first_s, cached = monotonic_s(), None, 0
    async for piece in client.stream(token_prompt(list(prompt)), max_tokens=max_tokens, **_GREEDY):
        first_s = first_s or monotonic_s()
        if hasattr(piece, "usage"):
            cached = piece.usage.cached_tokens
    assert first_s is not None, "an answer has a piece"
    return first_s - began_s, cached


def _prompt(rng: random.Random, tokens: int = _PROMPT_TOKENS) -> list[int]:
    return [rng.randrange(_VOCABULARY) for _ in range(tokens)]


def _p90(values: Sequence[float]) -> float:
    return float(np.percentile(values, 90))
