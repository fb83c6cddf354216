"""vLLM's own behaviour while no session is open."""

import random

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from tests.campaign.fuzz.simulated_engine import SimulatedEngine
from tests.campaign.fuzz.worlds import World
from tests.integration.stock_steps import play_the_same
from tests.integration.streaming_scheduler.sessions import EVERY_PROTOCOL, text

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(("v2", "depth"), EVERY_PROTOCOL)
def test_without_sessions_every_step_is_that_of_the_stock_scheduler(v2: bool, depth: int) -> None:
    # With tiers other prefixes are found; who is scheduled for what is the matter here.
    world = World(v2=v2, depth=depth, blocks=24, places=4, policy="lcas", tiers=False)
    stock = AsyncScheduler if depth > 1 else Scheduler
    assert sum(play_the_same((SimulatedEngine(world, stock), SimulatedEngine(world)), seed) for seed in range(3)) > 0


@pytest.mark.parametrize(("v2", "depth"), EVERY_PROTOCOL)
def test_after_the_last_session_every_step_is_that_of_the_stock_scheduler(v2: bool, depth: int) -> None:
    # With tiers other prefixes are found; who is scheduled for what is the matter here.
    world = World(v2=v2, depth=depth, blocks=24, places=4, policy="lcas", tiers=False)
    stock = SimulatedEngine(world, AsyncScheduler if depth > 1 else Scheduler)
    streaming = SimulatedEngine(world)
    serve_random_sessions(streaming, random.Random(depth))
    # Else the sessions' prompts would be found.
    assert streaming.scheduler.reset_prefix_cache()
    assert play_the_same((stock, streaming), seed=5) > 0


def serve_random_sessions(engine: SimulatedEngine, rng: random.Random) -> None:
    for index in range(12):
        prompt = text(index, rng.randrange(1, 200))
        engine.open(f"s{index}", prompt)
        engine.turn()
        engine.scheduler.replace_prompt(f"s{index}", prompt[: len(prompt) // 2] + text(-index, 40))
    for index in range(12):
        engine.turn()
        if index % 4:
            engine.scheduler.close_input(f"s{index}", text(index, 3))
        else:
            engine.abort(f"s{index}")
    engine.drain()
    engine.records.clear()
    engine.check_idle()
    engine.answers.clear()
