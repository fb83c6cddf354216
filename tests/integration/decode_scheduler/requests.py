"""Requests to a real decode scheduler without a model: what they ask, what they hold, when they begin."""

import random
from collections.abc import Callable
from dataclasses import replace

from vllm.v1.request import RequestStatus

from decode_worker.batch_settings import BatchSettings
from kv_transfer import vllm_private
from tests.campaign.fuzz.session_moves import VOCABULARY
from tests.campaign.fuzz.simulated_engine import BLOCK_SIZE, SimulatedEngine

EVERY_PROTOCOL = [(v2, depth) for v2 in (False, True) for depth in (1, 2)]
SETTINGS = BatchSettings(policy="heuristic", chunk_tokens=BLOCK_SIZE, guard=False)
GREEDY = replace(SETTINGS, policy="greedy")
LONG = 60
MakeEngine = Callable[..., SimulatedEngine]


def text(key: object, blocks: float) -> list[int]:
    """The same tokens for the same key."""
    rng = random.Random(str(key))
    return [rng.randrange(VOCABULARY) for _ in range(round(blocks * BLOCK_SIZE))]


def prompt(*parts: tuple[object, float]) -> list[int]:
    return [token for key, blocks in parts for token in text(key, blocks)]


def status(engine: SimulatedEngine, name: str) -> RequestStatus:
    its: RequestStatus = engine.scheduler.requests[name].status
    return its


def held_blocks(engine: SimulatedEngine, name: str) -> int:
    return len(vllm_private.request_blocks(engine.scheduler, name))


def until(engine: SimulatedEngine, condition: Callable[[], bool], most_turns: int = 400) -> None:
    for _ in range(most_turns):
        if condition():
            return
        engine.turn()
        engine.check_invariants()
    raise AssertionError("it does not come to that")


def begun(engine: SimulatedEngine) -> list[str]:
    """Whose computation has begun, in that order."""
    return [new.req_id for output in engine.outputs for new in output.scheduled_new_reqs]


def add_group(engine: SimulatedEngine, key: str, count: int, max_tokens: int = LONG) -> list[str]:
    """Requests that share ten blocks, and run."""
    names = [f"{key}{number}" for number in range(count)]
    for name in names:
        engine.add(name, prompt((key, 10), (name, 1.5)), max_tokens)
    until(engine, lambda: all(status(engine, name) is RequestStatus.RUNNING for name in names))
    return names
