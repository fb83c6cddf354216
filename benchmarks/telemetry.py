"""What traces and logs cost: routers that are equal but for them, in turns, over one worker that computes nothing.

    off       no collector, no memory for traces, `log_level: WARNING`: nothing is written of a request
    again     the same once more: what of a difference is the machine's
    traces    a share of the traces goes to a collector over OTLP, and the latest are remembered
    logs      `log_format: json`, `log_level: INFO`: a line for each request, to standard error and to a file

Figures are ratios to `off` (`router_turns`). Each request is recorded, whatever is set; what that costs, with the
memory for it, is measured apart (`recording_us`).
"""

import asyncio
import random
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rachis import AsyncClient, token_prompt
from rachis.v1 import admin_pb2 as admin

from benchmarks import child_module
from benchmarks.kept_command import KeptCommand
from benchmarks.otlp_collector import CountingCollector, listening
from benchmarks.paced_worker import PacedWorker
from benchmarks.router_turns import Arm, Turn, compared, in_turn, medians, spread
from builtin_model import WEIGHTS
from cluster_core.clock import cpu_s, monotonic_s
from cluster_core.ids import RequestId
from control_plane.model.lifecycle import RequestLifecycle
from control_plane.model.request_trace import TraceStage
from control_plane.service.embedded_redis import EmbeddedRedis
from control_plane.tracing.traces import Traces

SERVICE = "telemetry"
NEW_TOKENS = 8
PROMPT_TOKENS = 64
# Of each router, before anything counts: the first export loads OpenTelemetry's SDK.
WARM_UP = 40
_FIRST_EXPORT_S = 60.0
_SAMPLED = ("traceparent", f"00-{1:032x}-{1:016x}-01")
_RECORDED = 2000

Say = Callable[[str], None]


def recording_us() -> float:
    """CPU of one request's trace: its stages in both pools entered and divided, and the trace forgotten at its end."""
    traces = Traces()
    began_s = cpu_s()
    for number in range(_RECORDED):
        lifecycle = RequestLifecycle(RequestId(f"r{number}"))
        traces.begin(lifecycle, "request", None)
        trace = lifecycle.trace
        for stage in (TraceStage.TOKENIZATION, TraceStage.ADMISSION, TraceStage.PLACEMENT, TraceStage.PREFILL_CALL):
            trace.enter(stage, traces.now_s(), "prefill-0")
        trace.divide(traces.now_s(), (TraceStage.PREFILL_QUEUE, 1e-6), (TraceStage.PREFILL_COMPUTE, 1e-6))
        for stage in (TraceStage.FIRST_TOKEN, TraceStage.DECODE_PLACEMENT, TraceStage.DECODE_CALL):
            trace.enter(stage, traces.now_s(), "decode-0")
        trace.divide(traces.now_s(), (TraceStage.PULL, 1e-6), (TraceStage.DECODE_QUEUE, 1e-6))
        for stage in (TraceStage.DECODE, TraceStage.COMPLETION):
            trace.enter(stage, traces.now_s())
        traces.end(lifecycle)
    return round((cpu_s() - began_s) / _RECORDED * 1e6, 2)


@dataclass(frozen=True, slots=True)
class Wish:
    """requests: of each turn. steps_per_s: of the worker's engine, which gives every answer a token in each."""

    rounds: int = 20
    requests: int = 200
    concurrency: int = 8
    steps_per_s: float = 100.0
    sample_rate: float = 0.01
    # That are compared with `off`.
    arms: tuple[str, ...] = ("again", "traces", "logs")


def settings_of(arm: str, collector: str, sample_rate: float) -> dict[str, object]:
    """What a router is told beside what all of them are."""
    if arm == "traces":
        return {"tracing.otlp_endpoint": collector, "tracing.sample_rate": sample_rate}
    logged = {"log_format": "json", "log_level": "INFO"} if arm == "logs" else {}
    return {"tracing.memory_mib": 0, **logged}


class TelemetryBenchmark:
    """folder: for what its processes need, and their logs."""

    def __init__(self, folder: Path, wish: Wish, say: Say, seed: int = 0) -> None:
        self._folder = folder
        self._wish = wish
        self._say = say
        self._rng = random.Random(seed)
        self._collector = CountingCollector()

    async def run(self) -> dict[str, Any]:
        wish = self._wish
        async with AsyncExitStack() as ends:
            arms = await self._arms(ends)
            off = arms[0]
            exported = self._collector.requests
            for number in range(wish.rounds):
                for arm in in_turn(arms, number):
                    arm.turns.append(await self._turn(arm))
                self._say(f"round {number + 1} of {wish.rounds}")
            exported = self._collector.requests - exported
        traced = [turn.traced for arm in arms for turn in arm.turns if turn.traced is not None]
        return {
            **asdict(wish),
            "off": medians(off.turns),
            **{arm.name: compared(off.turns, arm.turns) for arm in arms[1:]},
            "exported": exported,
            "traced_of_client_time": asdict(spread(traced)) if traced else None,
            "recording_us": recording_us(),
        }

    async def _arms(self, ends: AsyncExitStack) -> list[Arm]:
        redis = EmbeddedRedis(self._folder)
        await redis.start()
        ends.push_async_callback(redis.stop)
        collector = await ends.enter_async_context(listening(self._collector))
        streams, steps = self._wish.concurrency, self._wish.steps_per_s
        worker = PacedWorker(redis.url, SERVICE, str(WEIGHTS), str(WEIGHTS), streams, steps)
        process = await ends.enter_async_context(
            child_module.running("benchmarks.paced_worker", asdict(worker), self._folder)
        )
        await child_module.said(process)
        return [
            await ends.enter_async_context(
                self._arm(name, redis.url, settings_of(name, collector, self._wish.sample_rate))
            )
            for name in ("off", *self._wish.arms)
        ]

    @asynccontextmanager
    async def _arm(self, name: str, redis_url: str, settings: dict[str, object]) -> AsyncIterator[Arm]:
        """Warm: its first requests are over, one of which was exported where any are."""
        folder = self._folder / name
        folder.mkdir()
        common = {"model.path": str(WEIGHTS), "service.name": SERVICE, "redis.url": redis_url}
        # No answer here is too slow: only those that are drawn are exported.
        router = KeptCommand("route", {**common, "objectives.ttft_s": 60.0, **settings}, folder)
        await router.start()
        try:
            async with AsyncClient(router.address) as client:
                arm = Arm(name, router, client)
                await asyncio.gather(*(self._ask(arm, f"warm-{each}") for each in range(WARM_UP)))
                first = client.with_metadata((_SAMPLED,))
                await first.generate(token_prompt(self._prompt()), max_tokens=1)
                async with asyncio.timeout(_FIRST_EXPORT_S):
                    # It comes from a process that has no event here.
                    while "tracing.otlp_endpoint" in settings and not self._collector.requests:  # noqa: ASYNC110
                        await asyncio.sleep(0.05)
                yield arm
        finally:
            await router.stop()

    async def _turn(self, arm: Arm) -> Turn:
        names = [f"{arm.name}-{len(arm.turns)}-{each}" for each in range(self._wish.requests)]
        turn, whole_ms = await arm.turn(names, self._wish.concurrency, lambda name: self._ask(arm, name))
        return replace(turn, traced=await _traced(arm, whole_ms)) if arm.name == "traces" else turn

    async def _ask(self, arm: Arm, name: str) -> tuple[float, float]:
        """TTFT and the whole time, in milliseconds."""
        began_s, first_s = monotonic_s(), 0.0
        prompt = token_prompt(self._prompt())
        async for _ in arm.client.stream(prompt, request_id=name, max_tokens=NEW_TOKENS, ignore_eos=True):
            first_s = first_s or monotonic_s()
        return (first_s - began_s) * 1000, (monotonic_s() - began_s) * 1000

    def _prompt(self) -> list[int]:
        return [self._rng.randrange(256) for _ in range(PROMPT_TOKENS)]


async def measure(wish: Wish, say: Say) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="rachis-telemetry-") as folder:
        return await TelemetryBenchmark(Path(folder), wish, say).run()


async def _traced(arm: Arm, whole_ms: dict[str, float]) -> float:
    """The median over the turn's requests of what their stages add up to, of the time that the client has waited."""
    listed = await arm.client.admin.ListRequests(admin.ListRequestsRequest(ended=len(whole_ms)))
    shares = [view.age_ms / whole_ms[view.request_id] for view in listed.ended if view.request_id in whole_ms]
    return float(np.median(shares))
