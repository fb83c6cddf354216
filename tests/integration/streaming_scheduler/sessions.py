"""Sessions on a real scheduler without a model: how far they are, what they hold, whom the next step computes."""

import random
from collections.abc import Callable
from typing import Any

from vllm.v1.request import RequestStatus

from kv_transfer import vllm_private
from prefill_worker.streaming_request import LOADING, PARKED
from tests.campaign.fuzz.session_moves import VOCABULARY
from tests.campaign.fuzz.simulated_engine import BLOCK_SIZE, SimulatedEngine

EVERY_PROTOCOL = [(v2, depth) for v2 in (False, True) for depth in (1, 2)]
MakeEngine = Callable[..., SimulatedEngine]


def text(key: object, count: int) -> list[int]:
    """The same tokens for the same key; a longer text begins with the shorter one."""
    rng = random.Random(str(key))
    return [rng.randrange(VOCABULARY) for _ in range(count)]


def request(engine: SimulatedEngine, name: str) -> Any:
    return engine.scheduler.requests[name]


def session_tokens(engine: SimulatedEngine, name: str) -> Any:
    return engine.scheduler.session_ledger(name).tokens


def held_blocks(engine: SimulatedEngine, name: str) -> list[int]:
    return [block.block_id for block in vllm_private.request_blocks(engine.scheduler, name)]


def until(engine: SimulatedEngine, condition: Callable[[], bool], most_turns: int = 200) -> None:
    for _ in range(most_turns):
        if condition():
            return
        engine.turn()
        engine.check_invariants()
    raise AssertionError("it does not come to that")


def park(engine: SimulatedEngine, name: str, prompt: list[int], max_tokens: int = 1, **fields: Any) -> None:
    """Opens a session and computes all of it but the token that is held back."""
    engine.open(name, prompt, max_tokens, **fields)
    until(engine, lambda: request(engine, name).status is PARKED)


def scheduled_next(engine: SimulatedEngine) -> list[str]:
    """Whose tokens the next step computes, first of all first."""
    engine.turn()
    return list(engine.outputs[-1].num_scheduled_tokens)


# Ways to bring a session into each of its states.


def waiting(engine: SimulatedEngine, name: str, prompt: list[int]) -> None:
    engine.open(name, prompt)
    assert request(engine, name).status is RequestStatus.WAITING


def running(engine: SimulatedEngine, name: str, prompt: list[int]) -> None:
    engine.open(name, prompt)
    engine.turn()
    assert request(engine, name).status is RequestStatus.RUNNING


def parked(engine: SimulatedEngine, name: str, prompt: list[int]) -> None:
    park(engine, name, prompt)


def preempted_by_swap(engine: SimulatedEngine, name: str, prompt: list[int], **fields: Any) -> None:
    park(engine, name, prompt, **fields)
    take_blocks_of(engine, name, "swap")
    assert engine.is_swapped(name)


def preempted_by_recompute(engine: SimulatedEngine, name: str, prompt: list[int]) -> None:
    park(engine, name, prompt)
    take_blocks_of(engine, name, "recompute")
    assert not engine.is_swapped(name)


def take_blocks_of(engine: SimulatedEngine, name: str, how: str) -> None:
    """A complete request needs nearly the whole pool."""
    engine.scheduler.preemption_strategy = how
    engine.add("hungry", text("hungry", (engine.world.blocks - 2) * BLOCK_SIZE))
    until(engine, lambda: not held_blocks(engine, name))
    until(engine, lambda: "hungry" in engine.answers)


def loading(engine: SimulatedEngine, name: str, prompt: list[int]) -> None:
    engine.remote_tokens[name] = len(prompt) // 2
    engine.open(name, prompt)
    engine.turn()
    assert request(engine, name).status is LOADING
