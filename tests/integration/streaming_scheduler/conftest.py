"""Engines without a model, on a clock that stands still. After every test all blocks and host slots come back."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.campaign.fuzz.simulated_engine import SimulatedEngine, SteppedClock
from tests.campaign.fuzz.worlds import World
from tests.integration.streaming_scheduler.sessions import MakeEngine


@pytest.fixture(autouse=True)
def clock() -> Iterator[SteppedClock]:
    with SteppedClock() as stepped:
        yield stepped


@pytest.fixture
def make_engine(clock: SteppedClock) -> Iterator[MakeEngine]:
    """Engines of worlds with these fields. What is left when the test ends is aborted, and nothing may be lost."""
    made: list[SimulatedEngine] = []

    def make(**fields: Any) -> SimulatedEngine:
        made.append(SimulatedEngine(World(**fields)))
        return made[-1]

    yield make
    for engine in made:
        for name in list(engine.scheduler.requests):
            engine.abort(name)
        engine.drain()
        engine.check_idle()
