"""Simulated engines with flat costs, and what comes of them."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest

from cluster_sim.costs.step_work import StepWork
from cluster_sim.engines.engine import Outcome, OutcomeKind, SimEngine, SimJob
from cluster_sim.engines.light_engine import LightEngine, LightEngineSettings
from kv_transfer.claims.prefix_chunks import Keys

BLOCK = 16
FIRST, FINISHED, PULLS, REFUSED = (
    OutcomeKind.FIRST_TOKEN,
    OutcomeKind.FINISHED,
    OutcomeKind.PULLS,
    OutcomeKind.REFUSED,
)


@dataclass(frozen=True, slots=True)
class FlatCosts:
    """Seconds: 10 ms a step, 0.1 ms a prompt token, 1 us a distinct token of context."""

    name: str = "flat"
    gpus: int = 1
    gpu_dollars_per_hour: float = 1.0
    kv_bytes_per_token: int = 1024
    device_tokens: int = 1600
    host_tokens: int = 0
    network_bytes_per_s: float = 1e9
    network_latency_s: float = 0.0

    def step_s(self, work: StepWork) -> float:
        return 0.01 + 1e-4 * work.prefill_tokens + 1e-6 * work.distinct_tokens

    def load_s(self, tokens: int) -> float:
        return 1e-5 * tokens

    def store_s(self, tokens: int) -> float:
        return 1e-5 * tokens


Make = Callable[..., SimEngine]


def light(blocks: int = 100, **settings: Any) -> SimEngine:
    return LightEngine(FlatCosts(), LightEngineSettings(BLOCK, blocks, **settings))


def on_vllm(kind: str) -> Make:
    def make(blocks: int = 100, **settings: Any) -> SimEngine:
        from cluster_sim.engines.vllm_engine import VllmSimEngine
        from cluster_sim.engines.vllm_schedulers import SchedulerKind, VllmEngineSettings

        return VllmSimEngine(FlatCosts(), VllmEngineSettings(SchedulerKind(kind), BLOCK, blocks, **settings))

    return make


def vllm_params(*kinds: str) -> list[Any]:
    return [pytest.param(on_vllm(each), id=each, marks=pytest.mark.integration) for each in kinds]


def keys_of(prompt: int, prefix: int = 0, group: int = 0) -> Keys:
    """Names of the blocks of a prompt of its own, but for the first ones, which a group shares."""
    own = prompt // BLOCK - prefix
    shared = np.arange(prefix, dtype=np.uint64) + np.uint64(10**9 + group * 10**6)
    return np.concatenate((shared, np.arange(own, dtype=np.uint64) + np.uint64(next(_fresh) * 10**4)))


_fresh = iter(range(1, 10**6))


def job(number: int, prompt: int = 64, output: int = 4, keys: Keys | None = None, **fields: Any) -> SimJob:
    return SimJob(number, prompt, keys_of(prompt) if keys is None else keys, output, **fields)


def drain(engine: SimEngine, until_s: float = math.inf) -> list[Outcome]:
    """All that comes of it by itself."""
    outcomes: list[Outcome] = []
    now_s = 0.0
    for _ in range(10_000):
        next_s = engine.next_s()
        if next_s > until_s or next_s == math.inf:
            return outcomes
        assert next_s >= now_s, "time goes back"
        now_s = next_s
        found = engine.advance(now_s)
        assert all(each.at_s <= now_s for each in found), "something is told before it has happened"
        outcomes += found
        engine.check_invariants()
    raise AssertionError("it does not end")


def told(outcomes: Sequence[Outcome]) -> list[tuple[int, OutcomeKind]]:
    return [(each.job.number, each.kind) for each in outcomes]


@dataclass(slots=True)
class Played:
    outcomes: list[tuple[int, OutcomeKind, float, int]]
    claims: list[int]
    load: tuple[int, int]


def play(engine: SimEngine, seed: int, jobs: int = 40, *, looks: bool = False) -> Played:
    """A random life: whoever hands off is released later, whoever pulls gets it, some are aborted.

    looks: `advance` is asked at times when nothing is due as well.
    """
    rng = random.Random(seed)
    planned: list[tuple[float, int, Callable[[float], None]]] = []
    now_s, count = 0.0, 0
    for number in range(1, jobs + 1):
        now_s += rng.expovariate(20)
        prompt, prefix = rng.randrange(10, 300), rng.choice((0, 0, 2, 5))
        shared = np.arange(min(prefix, prompt // BLOCK), dtype=np.uint64) + np.uint64(7 * 10**6)
        own = np.arange(prompt // BLOCK - len(shared), dtype=np.uint64) + np.uint64(number * 1000)
        each = SimJob(
            number,
            prompt,
            np.concatenate((shared, own)),
            rng.randrange(1, 60),
            hand_off=rng.random() < 0.3,
            pulls=rng.random() < 0.3,
        )
        planned.append((now_s, count := count + 1, partial(engine.add, each)))
        if rng.random() < 0.1:
            at_s = now_s + rng.random()
            planned.append((at_s, count := count + 1, partial(engine.abort, number)))
    delays = {number: rng.random() / 2 for number in range(1, jobs + 1)}
    played = Played([], [], (0, 0))
    looked_s = 0.0
    while planned or engine.next_s() < math.inf:
        planned.sort(key=lambda row: row[:2])
        next_s = min(engine.next_s(), planned[0][0] if planned else math.inf)
        if looks and next_s - looked_s > 1e-3:
            assert not engine.advance((looked_s + next_s) / 2)
        looked_s = next_s
        if planned and planned[0][0] <= engine.next_s():
            at_s, _, action = planned.pop(0)
            action(at_s)
        for outcome in engine.advance(next_s):
            number, at_s = outcome.job.number, next_s + delays[outcome.job.number]
            played.outcomes.append((number, outcome.kind, outcome.at_s, outcome.tokens))
            if outcome.kind is PULLS:
                planned.append((at_s, count := count + 1, partial(engine.landed, number)))
            elif outcome.kind is FINISHED and outcome.job.hand_off:
                planned.append((at_s, count := count + 1, partial(engine.release, number)))
        engine.check_invariants()
        change = engine.claim_changes()
        played.claims += [*change.device_stored.tolist(), *(-each for each in change.device_removed.tolist())]
    played.load = engine.load()
    return played
