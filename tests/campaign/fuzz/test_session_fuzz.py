"""Random sessions get the answers of fresh requests, on simulated engines and on a real one; planted bugs are found.

Short runs of `make fuzz`.
"""

from collections.abc import Iterator
from itertools import islice

import pytest

from tests.campaign.fuzz.__main__ import find_planted
from tests.campaign.fuzz.planted import PLANTS
from tests.campaign.fuzz.simulated import play
from tests.campaign.fuzz.tally import Tally
from tests.engine_process import in_engine_process

pytestmark = pytest.mark.integration

SIMULATED_SESSIONS = 400
REAL_SESSIONS = 80
MOST_CONTROL_SESSIONS = 1500
MOST_REAL_CONTROL_SESSIONS = 300
SEED = 1
# Worlds that show a bug, so that those before need not be played.
FIRST_WORLD = {
    "writes_published_blocks": 4,
    "keeps_one_token_too_many": 12,
    "keeps_old_block_hashes": 3,
    "update_forgets_host_copies": 12,
    "swap_in_is_skipped": 9,
    "swap_out_comes_late": 9,
    "dropped_copies_stay": 12,
    "copies_what_is_not_written": 17,
    "copies_hold_no_blocks": 17,
    "failed_copies_count_as_landed": 4,
    "promotions_are_there_too_early": 20,
}


def until(sessions: int, tallies: Iterator[Tally]) -> Tally:
    """The sum over worlds until so many sessions were compared or something was wrong."""
    total = Tally()
    for tally in tallies:
        total.add(tally)
        if total.wrong or total.sessions >= sessions:
            return total
    raise AssertionError("worlds have no end")


@pytest.mark.parametrize("v2", [False, True], ids=["v1", "v2"])
def test_simulated_sessions_answer_as_fresh_requests_do(v2: bool) -> None:
    tally = until(SIMULATED_SESSIONS, play(SEED, v2=v2))
    assert not tally.wrong, tally.wrong
    assert min(tally.cancelled, tally.appends, tally.updates) > 0
    assert min(tally.swaps, tally.recomputes, tally.loads, tally.invalidated_tokens) > 0
    assert min(tally.copied_out, tally.copied_back, tally.promoted) > 0


@pytest.mark.parametrize("name", PLANTS)
def test_simulation_finds_a_planted_bug(name: str) -> None:
    with PLANTS[name].planted():
        assert until(MOST_CONTROL_SESSIONS, play(SEED, FIRST_WORLD.get(name, 0))).wrong, PLANTS[name].breaks


def test_the_same_seed_plays_the_same_worlds() -> None:
    def first_three(worlds: Iterator[Tally]) -> list[Tally]:
        return list(islice(worlds, 3))

    assert first_three(play(SEED)) == first_three(play(SEED))
    assert first_three(play(SEED)) != first_three(play(SEED + 1))


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


def real_trials() -> tuple[Tally, dict[str, int | None]]:
    """On one engine: what its sessions have done, and after how many sessions each planted bug was found."""
    from tests.campaign.fuzz import real_engine

    engine = real_engine.RealEngine()
    try:
        tally = until(REAL_SESSIONS, real_engine.play(engine, SEED))
        return tally, dict(find_planted(engine, MOST_REAL_CONTROL_SESSIONS, SEED))
    finally:
        engine.close()
