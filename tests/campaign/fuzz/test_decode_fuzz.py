"""Random requests to decode schedulers get the answers of fresh ones, whoever is admitted when; planted bugs are found.

Short runs of `python -m tests.campaign.fuzz decode`.
"""

import json
from itertools import islice
from unittest import mock

import pytest
from typer.testing import CliRunner

from decode_worker.adapter_places import AdapterPlaces
from tests.campaign.fuzz.__main__ import app
from tests.campaign.fuzz.decode_batches import play
from tests.campaign.fuzz.planted_decode import DECODE_PLANTS
from tests.campaign.fuzz.tally import Tally, until

pytestmark = pytest.mark.integration

REQUESTS = 500
MOST_CONTROL_REQUESTS = 3000
SEED = 1
# Worlds that show a bug, so that those before need not be played.
FIRST_WORLD: dict[str, int] = {}


@pytest.mark.parametrize("v2", [False, True], ids=["v1", "v2"])
def test_requests_answer_as_fresh_ones_do(v2: bool) -> None:
    tally = until(REQUESTS, play(SEED, v2=v2), "requests")
    assert not tally.wrong, tally.wrong
    assert min(tally.cancelled, tally.recomputes, tally.loads, tally.failed_loads, tally.emitted) > 0
    assert tally.copied_back > tally.copied_back_async > 0
    assert min(tally.joined_fcfs, tally.joined_policy, tally.joined_priority) > 0
    assert min(tally.joined_turn, tally.joined_overdue, tally.joined_idle, tally.joined_share) > 0


@pytest.mark.parametrize("name", DECODE_PLANTS)
def test_simulation_finds_a_planted_bug(name: str) -> None:
    with DECODE_PLANTS[name].planted():
        tally = until(MOST_CONTROL_REQUESTS, play(SEED, FIRST_WORLD.get(name, 0)), "requests")
        assert tally.wrong, DECODE_PLANTS[name].breaks


def test_a_step_in_flight_makes_no_room_for_one_adapter_too_many() -> None:
    """Two steps at a time, few blocks, everything pulled: vLLM leaves running requests out of a step there."""

    def one() -> Tally:
        fixed = {"depth": 2, "loads": 1.0, "adapters": 3, "adapters_in_step": 1, "blocks": 24}
        return next(play(902, 60, **fixed))

    assert not one().wrong
    # Planted.
    with mock.patch.object(AdapterPlaces, "_has_adapter_place", lambda self, request: True):
        assert one().wrong, "vLLM counts them itself by now: decode_worker.adapter_places can go"


def test_the_same_seed_plays_the_same_worlds() -> None:
    assert list(islice(play(SEED), 2)) == list(islice(play(SEED), 2))
    assert list(islice(play(SEED), 2)) != list(islice(play(SEED + 1), 2))


def test_the_command_tells_what_came_out() -> None:
    ran = CliRunner().invoke(app, ["decode", "--requests", "40", "--seed", str(SEED), "--json"])
    assert ran.exit_code == 0, ran.output
    told = json.loads(ran.stdout.splitlines()[-1])
    assert (told["engine"], told["seed"], told["plant"]) == ("decode", SEED, None)
    assert (told["wrong"], told["findings"], told["requests"] >= 40) == (0, [], True)


def test_nobody_who_is_to_be_loaded_waits_for_good_for_blocks_that_a_failed_pull_keeps() -> None:
    """It waits until nobody runs, and is loaded before the step then."""
    assert not next(play(41, 33)).wrong
