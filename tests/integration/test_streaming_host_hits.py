"""Prompts whose beginning lies in host memory, while sessions are open.

Real schedulers without a model, on a clock that is moved by hand (`simulated`). Each case was a defect once.
"""

from collections.abc import Iterator

import pytest

from prefill_worker.policies import POLICIES
from tests.campaign.fuzz.simulated_engine import SimulatedEngine, SteppedClock
from tests.campaign.fuzz.worlds import World
from tests.integration.test_streaming_fairness import numbered, turn

pytestmark = pytest.mark.integration

COMPUTED = 10
OTHER_BLOCKS = 100


@pytest.fixture(autouse=True)
def clock() -> Iterator[SteppedClock]:
    with SteppedClock() as stepped:
        yield stepped


def in_host_memory_only(engine: SimulatedEngine, clock: SteppedClock, prefix: list[int]) -> None:
    """Asked for until it is kept in host memory, then pushed out of the device by what nobody asks for again."""
    begins_with = prefix[0]
    for index in range(3):
        engine.add(f"warm {begins_with} {index}", [*prefix, index])
        engine.drain()
    for index in range(engine.world.blocks // OTHER_BLOCKS + 1):
        engine.add(f"other {begins_with} {index}", numbered(200 - 10 * begins_with - index, OTHER_BLOCKS * 16))
        engine.drain()
    clock.advance(1.0)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("budget", [96, 256, 1024])
def test_a_prompt_whose_prefix_in_host_memory_is_longer_than_a_step_takes_the_blocks_of_an_idle_session(
    policy: str, budget: int, clock: SteppedClock
) -> None:
    engine = SimulatedEngine(World(policy=policy, blocks=141, host_slots=400, token_budget=budget))
    prefix = numbered(1, 1600)
    in_host_memory_only(engine, clock, prefix)
    engine.open("idle", numbered(2, 961))
    for _ in range(20):
        turn(engine, clock)
    engine.outputs.clear()
    engine.add("probe", [*prefix, *numbered(3, COMPUTED)])
    for _ in range(20):
        turn(engine, clock)

    assert len(engine.answers["probe"]) == 1
    assert sum(output.num_scheduled_tokens.get("probe", 0) for output in engine.outputs) == COMPUTED


def test_what_is_loaded_from_host_memory_is_not_charged_to_the_budget_of_a_step(clock: SteppedClock) -> None:
    engine = SimulatedEngine(World(blocks=401, host_slots=400, token_budget=1024))
    prefixes = [numbered(start, 960) for start in range(4)]
    for prefix in prefixes:
        in_host_memory_only(engine, clock, prefix)
    engine.open("idle", [])
    engine.outputs.clear()
    for index, prefix in enumerate(prefixes):
        engine.add(f"probe{index}", [*prefix, *numbered(3, COMPUTED)])
    turn(engine, clock)

    assert engine.outputs[0].num_scheduled_tokens == {f"probe{index}": COMPUTED for index in range(4)}
