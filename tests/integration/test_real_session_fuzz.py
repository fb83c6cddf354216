"""Random sessions get the answers of fresh requests on a real engine, which finds planted bugs as well.

A short run of `make fuzz`.
"""

import pytest

from tests.campaign.fuzz.__main__ import find_planted
from tests.campaign.fuzz.planted import PLANTS
from tests.campaign.fuzz.tally import Tally, until
from tests.engine_process import in_engine_process
from worker_runtime.engine_settings import EngineRole

pytestmark = pytest.mark.integration

SESSIONS = 80
MOST_CONTROL_SESSIONS = 300
SEED = 1


@pytest.fixture(scope="module")
def real() -> tuple[Tally, dict[str, int | None]]:
    return in_engine_process(real_trials)


def test_real_sessions_answer_as_fresh_requests_do(real: tuple[Tally, dict[str, int | None]]) -> None:
    tally, _ = real
    assert not tally.wrong, tally.wrong
    assert min(tally.cancelled, tally.appends, tally.updates) > 0
    assert min(tally.swaps, tally.recomputes, tally.invalidated_tokens) > 0
    assert min(tally.copied_out, tally.copied_back, tally.promoted) > 0


def test_real_engine_finds_planted_bugs(real: tuple[Tally, dict[str, int | None]]) -> None:
    _, found = real
    assert set(found) == {name for name, plant in PLANTS.items() if plant.real}
    assert all(after is not None for after in found.values()), found


def test_sessions_beside_whole_requests_on_an_engine_that_does_both_answer_as_fresh_ones_do() -> None:
    tally = in_engine_process(shared_trials)
    assert not tally.wrong, tally.wrong
    assert min(tally.sessions, tally.requests, tally.cancelled, tally.appends, tally.updates, tally.bounded) > 0
    assert min(tally.copied_out, tally.copied_back) > 0


def shared_trials() -> Tally:
    from tests.campaign.fuzz import real_engine

    engine = real_engine.RealEngine(EngineRole.SHARED)
    try:
        return until(SESSIONS, real_engine.play(engine, SEED))
    finally:
        engine.close()


def real_trials() -> tuple[Tally, dict[str, int | None]]:
    """On one engine: what its sessions have done, and after how many sessions each planted bug was found."""
    from tests.campaign.fuzz import real_engine

    engine = real_engine.RealEngine()
    try:
        tally = until(SESSIONS, real_engine.play(engine, SEED))
        return tally, dict(find_planted(engine, MOST_CONTROL_SESSIONS, SEED))
    finally:
        engine.close()
