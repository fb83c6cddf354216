"""Schedulers that do both, without a model, on a clock that is set. After every test all blocks come back."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cluster_core.engine_reports import EngineCosts
from decode_worker.batch_settings import BatchSettings
from tests.campaign.fuzz.simulated_engine import BLOCK_SIZE, STEP_S, SimulatedEngine, SteppedClock
from tests.campaign.fuzz.worlds import World

# Everybody joins who finds a place.
GREEDY = BatchSettings(policy="greedy", chunk_tokens=BLOCK_SIZE, guard=False)
# 10 ms for a step, and 1 ms for each token of a prompt.
COSTS = EngineCosts(decode_step_s=0.010, prefill_s_per_token=0.001)
MakeEngine = Callable[..., SimulatedEngine]


@pytest.fixture(autouse=True)
def clock() -> Iterator[SteppedClock]:
    with SteppedClock() as stepped:
        yield stepped


@pytest.fixture
def make_engine(clock: SteppedClock) -> Iterator[MakeEngine]:
    """Engines of worlds with these fields. What is left when the test ends is aborted, and nothing may be lost."""
    made: list[SimulatedEngine] = []

    def make(**fields: Any) -> SimulatedEngine:
        its: dict[str, Any] = {
            "blocks": 200, "places": 8, "token_budget": 400, "policy": "default", "decode": GREEDY, "is_shared": True,
        }  # fmt: skip
        engine = SimulatedEngine(World(**its | fields))
        engine.scheduler.recompute_kv_load_failures = True
        engine.scheduler.use_costs(lambda: COSTS)
        made.append(engine)
        carry_out = engine.runner.step

        def step(output: Any) -> Any:
            clock.advance(STEP_S)
            return carry_out(output)

        # A step takes time, so that there are costs to go by.
        engine.runner.step = step  # type: ignore[method-assign]
        return engine

    yield make
    for engine in made:
        for name in list(engine.scheduler.requests):
            engine.abort(name)
        engine.drain()
        engine.check_idle()
        assert all(engine.runner.read_leases.values()), "a lease was written over"
        batching = engine.scheduler.batching
        assert batching is None or not [*batching.batch(), *batching.waiting()]
