"""Engines without a model, on a clock that is set. After every test all blocks come back."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.campaign.fuzz.simulated_engine import STEP_S, SimulatedEngine, SteppedClock
from tests.campaign.fuzz.worlds import World
from tests.integration.decode_scheduler.requests import SETTINGS, MakeEngine


@pytest.fixture(autouse=True)
def clock() -> Iterator[SteppedClock]:
    with SteppedClock() as stepped:
        yield stepped


@pytest.fixture
def make_engine(clock: SteppedClock) -> Iterator[MakeEngine]:
    """Engines of worlds with these fields. What is left when the test ends is aborted, and nothing may be lost."""
    made: list[SimulatedEngine] = []

    def make(**fields: Any) -> SimulatedEngine:
        its: dict[str, Any] = {"blocks": 200, "places": 8, "token_budget": 400, "sessions": 0, "decode": SETTINGS}
        engine = SimulatedEngine(World(**its | fields))
        engine.scheduler.recompute_kv_load_failures = True
        made.append(engine)
        carry_out = engine.runner.step

        def step(output: Any) -> Any:
            clock.advance(STEP_S)
            return carry_out(output)

        # The runner's steps move the clock here; elsewhere the player does.
        engine.runner.step = step  # type: ignore[method-assign]
        return engine

    yield make
    for engine in made:
        for name in list(engine.scheduler.requests):
            engine.abort(name)
        engine.drain()
        engine.check_idle()
        if engine.scheduler.batching is not None:
            # A leak of state of requests that have ended is visible nowhere else.
            assert not engine.scheduler.batching._batch
            assert not list(engine.scheduler.batching.waiting())
