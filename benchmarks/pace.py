"""Many answers at once out of imitated GPUs, and whether their tokens come as the cost model says.

It runs in a process of its own, beside the service. Messages are read as gRPC has them, by no client of ours: what is
measured is the other end.
"""

import asyncio
import gc
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import quantiles
from typing import Any

import grpc
from rachis import AsyncClient, conventions
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import router_pb2 as api
from rachis.v1 import router_pb2_grpc
from rachis.v1 import worker_pb2 as wire

from benchmarks.measuring_process import Reports, run_measurement
from cluster_core.clock import cpu_s, monotonic_s
from cluster_core.errors import UnavailableError
from cluster_sim.costs.step_work import CostModel, StepWork

# Tokens that any vocabulary has.
_VOCABULARY = 90
_LONGEST_START_S = 300.0
_MESSAGE_BYTES = 64 << 20
# How many streams a second begin: prompts of many that begin at once are computed in steps that nobody waits for.
_BEGIN_PER_S = 100.0
_SETTLE_S = 10.0


@dataclass(frozen=True, slots=True)
class Streams:
    """address: of a router. prompt_tokens: of each, all different. max_tokens: more than come in the time."""

    address: str
    streams: int
    prompt_tokens: int
    max_tokens: int
    seconds: float
    seed: int = 0


@dataclass(slots=True)
class Arrivals:
    """Of one stream: when each message came, and with how many tokens."""

    tokens: int = 0
    messages: list[tuple[float, int]] = field(default_factory=list)

    def gaps_ms(self, from_s: float, until_s: float) -> list[tuple[float, int]]:
        """Between two messages in that time, and the tokens of the later one."""
        times = [(at_s, tokens) for at_s, tokens in self.messages if from_s <= at_s <= until_s]
        return [(1000 * (at_s - last_s), n) for (last_s, _), (at_s, n) in itertools.pairwise(times)]


async def measure(arguments: dict[str, Any], reports: Reports) -> dict[str, Any]:
    """arguments: those of `Streams`. Raises UnavailableError where streams end, or do not begin."""
    # A collection walks all that has come so far, while what comes waits.
    gc.disable()
    asked = Streams(**arguments)
    arrivals = [Arrivals() for _ in range(asked.streams)]
    reports.phase("streams begin")
    reports.total(asked.streams)
    options = conventions.channel_options(_MESSAGE_BYTES)
    async with (
        grpc.aio.insecure_channel(asked.address, options=options) as channel,
        AsyncClient(asked.address) as client,
    ):
        stub = router_pb2_grpc.RouterServiceStub(channel)
        reading = []
        try:
            for number, each in enumerate(arrivals):
                reading.append(asyncio.create_task(_read(stub, asked, number, each)))
                reports.done()
                await asyncio.sleep(1 / _BEGIN_PER_S)
            await _begun(reading, arrivals)
            # What was behind while prompts were computed catches up.
            reports.phase("settling")
            await asyncio.sleep(_SETTLE_S)
            reports.phase("measuring")
            from_s, cpu_before_s, before = monotonic_s(), cpu_s(), [each.tokens for each in arrivals]
            await asyncio.sleep(asked.seconds / 2)
            running = await _running(client)
            await asyncio.sleep(asked.seconds / 2)
            _raise_of_ended(reading)
            until_s, after = monotonic_s(), [each.tokens for each in arrivals]
            return {
                "seconds": until_s - from_s,
                "client_cpu_s": cpu_s() - cpu_before_s,
                "running": running,
                "tokens": sum(after) - sum(before),
                "mean_place": asked.prompt_tokens + (sum(before) + sum(after)) / 2 / asked.streams,
                "gaps_ms": [gap for each in arrivals for gap in each.gaps_ms(from_s, until_s)],
            }
        finally:
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)


async def _begun(reading: Sequence["asyncio.Task[None]"], arrivals: Sequence[Arrivals]) -> None:
    began_s = monotonic_s()
    while not all(each.tokens > 1 for each in arrivals):
        _raise_of_ended(reading)
        if monotonic_s() - began_s > _LONGEST_START_S:
            raise UnavailableError(f"not all streams have begun after {_LONGEST_START_S:g} s")
        await asyncio.sleep(0.05)


async def _read(stub: Any, asked: Streams, number: int, arrivals: Arrivals) -> None:
    rng = Random(f"{asked.seed}/{number}")
    ids = [rng.randrange(_VOCABULARY) for _ in range(asked.prompt_tokens)]
    sampling = generation.SamplingParams(max_tokens=asked.max_tokens, ignore_eos=True)
    prompt = generation.PromptInput(token_ids=generation.TokenIds(ids=ids))
    async for message in stub.Generate(api.GenerateRequest(prompt=prompt, sampling=sampling)):
        if message.HasField("delta"):
            arrivals.tokens += len(message.delta.token_ids)
            arrivals.messages.append((monotonic_s(), len(message.delta.token_ids)))


def _raise_of_ended(reading: Iterable["asyncio.Task[None]"]) -> None:
    for task in reading:
        if task.done():
            error = task.exception()
            raise UnavailableError(f"a stream ended before its time: {error or 'give --max-tokens more'}")


async def _running(client: AsyncClient) -> dict[str, int]:
    """How many answers each decode worker has."""
    views = [view for view in await client.workers() if view.registration.pool == wire.POOL_DECODE]
    return {view.registration.worker_id: view.load.running_requests for view in views if view.load.running_requests}


def per_token_ms(gaps_ms: Iterable[tuple[float, int]]) -> list[float]:
    """Time between tokens, sorted: those that come together share the time since the last message."""
    return sorted(each for gap_ms, tokens in gaps_ms if tokens for each in [gap_ms / tokens] * tokens)


def modelled_ms(costs: CostModel, running: Mapping[str, int], mean_place: float) -> list[float]:
    """Of each answer the step that it is in, sorted. running: answers of each worker. mean_place: of their tokens."""
    steps = []
    for answers in running.values():
        context = answers * mean_place
        step_s = costs.step_s(StepWork(0, 0.0, answers, context, context))
        steps += [1000 * step_s] * answers
    return sorted(steps)


@dataclass(frozen=True, slots=True)
class PaceReport:
    """Times between tokens in ms; the modelled ones are of steps that the cost model gives to so many answers. start_s:
    until the service was up."""

    streams: int
    cost_model: str
    start_s: float | None
    tokens_per_s: float
    tokens_per_message: float
    p50_ms: float
    p99_ms: float
    modelled_p50_ms: float
    modelled_p99_ms: float
    client_cores: float
    by_worker: Mapping[str, int]

    @property
    def p99_of_model(self) -> float:
        return self.p99_ms / self.modelled_p99_ms


def report_of(measured: Mapping[str, Any], costs: CostModel, streams: int, start_s: float | None) -> PaceReport:
    """measured: what `measure` returns."""
    times, steps = (
        per_token_ms(measured["gaps_ms"]),
        modelled_ms(costs, measured["running"], measured["mean_place"]),
    )
    (p50, p99), (modelled_p50, modelled_p99) = _p50_p99(times), _p50_p99(steps)
    return PaceReport(
        streams=streams,
        cost_model=costs.name,
        start_s=start_s,
        tokens_per_s=round(measured["tokens"] / measured["seconds"], 1),
        tokens_per_message=round(len(times) / max(1, len(measured["gaps_ms"])), 3),
        p50_ms=round(p50, 3),
        p99_ms=round(p99, 3),
        modelled_p50_ms=round(modelled_p50, 3),
        modelled_p99_ms=round(modelled_p99, 3),
        client_cores=round(measured["client_cpu_s"] / measured["seconds"], 2),
        by_worker=measured["running"],
    )


def _p50_p99(times: Sequence[float]) -> tuple[float, float]:
    cuts = quantiles(times, n=100, method="inclusive") if len(times) > 1 else [*times] * 99
    return cuts[49], cuts[98]


if __name__ == "__main__":
    run_measurement(measure)
