"""What a swapped session that comes back costs the prompts beside it, and itself: by where its copy runs.

One prefill engine with the streaming scheduler in simulated time, costs of an H100 with an 8B model. A session is
swapped out for a prompt that needs the whole device; later its input is closed, while short prompts come all the time.
Copies back are synchronous, asynchronous, or as the rule of `kv_transfer.tiers.async_loads` has it.
Run it: python -m benchmarks.async_resumes
"""

import math
from dataclasses import dataclass
from itertools import count
from unittest import mock

import numpy as np

from benchmarks.async_loads import WAYS
from cluster_configs.preemption_costs import CostModel, LatencyCurve
from cluster_core.engine_jobs import SessionMode
from cluster_sim.costs import catalog
from cluster_sim.engines.engine import OutcomeKind, SimInput, SimJob
from cluster_sim.engines.vllm_engine import VllmSimEngine
from cluster_sim.engines.vllm_schedulers import SchedulerKind, VllmEngineSettings
from kv_transfer.claims.claims import no_keys
from kv_transfer.tiers.async_loads import AsyncLoads

_BLOCK_TOKENS = 16
_REST_TOKENS = 64
_SHORT_TOKENS = 256
# The session is there, and has gone, after so long; it comes back within.
_SETTLED_S = 10.0
_BEFORE_S, _BESIDE_S = 0.2, 1.0


@dataclass(frozen=True, slots=True)
class Scene:
    """every_s: how often a short prompt comes."""

    session_tokens: int
    every_s: float
    rounds: int = 10


SCENES = (Scene(8_192, 0.02), Scene(32_768, 0.02), Scene(32_768, 0.01), Scene(100_000, 0.02))


@dataclass(frozen=True, slots=True)
class Figures:
    """In milliseconds. short_p50, short_p99: TTFT of the short prompts. session_p50: of sessions, from their `finish`.

    async_share: of the blocks that came back.
    """

    short_p50: float
    short_p99: float
    session_p50: float
    async_share: float


class _Rounds:
    def __init__(self, scene: Scene) -> None:
        model = catalog.load("h100-llama-3.1-8b")
        blocks = 2 + (scene.session_tokens + 4_096) // _BLOCK_TOKENS
        curve = LatencyCurve({scene.session_tokens: (model.load_s(scene.session_tokens) * 1000,)})
        self._engine = VllmSimEngine(
            model,
            VllmEngineSettings(
                kind=SchedulerKind.STREAMING,
                block_tokens=_BLOCK_TOKENS,
                device_blocks=blocks,
                host_blocks=2 * blocks,
                preemption="swap",
                preemption_costs=CostModel(curve, curve, curve),
            ),
        )
        self._scene = scene
        self._whole_device = blocks * _BLOCK_TOKENS - _BLOCK_TOKENS
        self._numbers = count()
        self._now_s = 0.0
        self._asked_s: dict[int, float] = {}
        self.short_s: list[float] = []
        self.session_s: list[float] = []

    def run(self) -> Figures:
        for _ in range(self._scene.rounds):
            self._round()
        counters = self._engine.scheduler.swaps.counters
        short_p50, short_p99 = 1000 * np.percentile(self.short_s, (50, 99))
        session_p50 = 1000 * np.median(self.session_s)
        return Figures(
            float(short_p50), float(short_p99), float(session_p50), counters.blocks_back_async / counters.blocks_back
        )

    def _round(self) -> None:
        session = next(self._numbers)
        first, rest = ([7] * tokens for tokens in (self._scene.session_tokens, _REST_TOKENS))
        self._engine.open(SimJob(session, 0, no_keys(), 1), _input(first), SessionMode.APPEND, self._now_s)
        self._until(self._now_s + _SETTLED_S)
        self._prompt(self._whole_device)
        self._until(self._now_s + _SETTLED_S)
        assert self._engine.scheduler.swaps.tokens(str(session)), "the session is in host memory"
        ends_s = self._now_s + _BEFORE_S + _BESIDE_S
        closes_s = self._now_s + _BEFORE_S
        while self._now_s < ends_s:
            self._asked_s[self._prompt(_SHORT_TOKENS)] = self._now_s
            self._until(self._now_s + self._scene.every_s)
            if self._now_s >= closes_s:
                self._asked_s[session], closes_s = self._now_s, math.inf
                self._engine.take_input(session, _input(rest, is_last=True), self._now_s)
        self._until(self._now_s + _SETTLED_S)
        self.session_s.append(self._asked_s.pop(session))
        self.short_s += self._asked_s.values()
        self._asked_s.clear()

    def _prompt(self, tokens: int) -> int:
        number = next(self._numbers)
        self._engine.add(SimJob(number, tokens, no_keys(), 1), self._now_s)
        return number

    def _until(self, end_s: float) -> None:
        while self._engine.next_s() <= end_s:
            self._now_s = self._engine.next_s()
            for outcome in self._engine.advance(self._now_s):
                if outcome.kind is OutcomeKind.FINISHED and outcome.job.number in self._asked_s:
                    self._asked_s[outcome.job.number] = outcome.at_s - self._asked_s[outcome.job.number]
        self._now_s = end_s


def run(scene: Scene, way: str) -> Figures:
    with mock.patch.object(AsyncLoads, "is_cheaper", WAYS[way]):
        return _Rounds(scene).run()


def _input(tokens: list[int], *, is_last: bool = False) -> SimInput:
    return SimInput(tokens, 0, 0, no_keys(), is_last=is_last)


if __name__ == "__main__":
    for scene in SCENES:
        print(f"a session of {scene.session_tokens} tokens, a prompt each {scene.every_s} s, in ms", flush=True)
        for way in WAYS:
            found = run(scene, way)
            short = f"prompts' TTFT P50 {found.short_p50:6.1f}  P99 {found.short_p99:6.1f}"
            print(f"  {way:16} {short}  session's {found.session_p50:6.1f}  async {found.async_share:.0%}", flush=True)
