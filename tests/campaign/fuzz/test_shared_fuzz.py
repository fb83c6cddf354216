"""Random requests of every kind to schedulers that do both get the answers of fresh ones; planted bugs are found.

A short run of `python -m tests.campaign.fuzz shared`.
"""

import json
from itertools import islice

import pytest
from typer.testing import CliRunner

from tests.campaign.fuzz.__main__ import app
from tests.campaign.fuzz.planted_shared import SHARED_PLANTS
from tests.campaign.fuzz.shared_engines import play
from tests.campaign.fuzz.tally import until

pytestmark = pytest.mark.integration

REQUESTS = 400
MOST_CONTROL_REQUESTS = 2000
SEED = 1
# Worlds that show a bug, so that those before need not be played.
FIRST_WORLD: dict[str, int] = {
    "the_bound_is_ignored": 43,
    "a_late_prompt_takes_what_decodes_have_not_to_spare": 28,
    "all_are_taken_for_best_effort": 31,
    "the_step_that_runs_counts_for_nothing": 28,
    "what_others_have_answered_counts_as_decoded_here": 56,
    "running_prompts_are_not_limited": 58,
    "limits_outlive_their_step": 84,
    "landed_requests_wait_in_line": 56,
    "prompts_keep_their_blocks_before_what_has_landed": 135,
}


def test_requests_of_every_kind_answer_as_fresh_ones_do() -> None:
    tally = until(REQUESTS, play(SEED), "requests")
    assert not tally.wrong, tally.wrong
    assert min(tally.sessions, tally.cancelled, tally.appends, tally.updates) > 0
    assert min(tally.loads, tally.leases, tally.emitted, tally.recomputes, tally.swaps) > 0
    assert min(tally.bounded, tally.yielded, tally.copied_out, tally.swapped_back_async) > 0
    assert tally.copied_back > tally.copied_back_async > 0


@pytest.mark.parametrize(("seed", "world"), [(91, 193), (91, 318), (97, 162)])
def test_who_has_an_adapters_place_makes_room_for_who_has_the_blocks(seed: int, world: int) -> None:
    """Each had waited for the other; in the last world who has the place decodes."""
    (tally,) = islice(play(seed, world), 1)
    assert not tally.wrong, tally.wrong


def test_a_step_of_prompts_alone_is_part_of_what_an_answer_from_elsewhere_has_taken() -> None:
    """A step had more of a prompt than the decodes beside it had to spare."""
    (tally,) = islice(play(97, 239), 1)
    assert not tally.wrong, tally.wrong


def test_a_session_that_is_held_back_holds_up_nobody() -> None:
    """Whole prompts of others had to leave it its blocks, and none of them fitted."""
    (tally,) = islice(play(103, 54), 1)
    assert not tally.wrong, tally.wrong


@pytest.mark.parametrize("name", SHARED_PLANTS)
def test_simulation_finds_a_planted_bug(name: str) -> None:
    with SHARED_PLANTS[name].planted():
        tally = until(MOST_CONTROL_REQUESTS, play(SEED, FIRST_WORLD.get(name, 0)), "requests")
        assert tally.wrong, SHARED_PLANTS[name].breaks


def test_the_same_seed_plays_the_same_worlds() -> None:
    assert list(islice(play(SEED), 2)) == list(islice(play(SEED), 2))


def test_the_command_tells_what_came_out() -> None:
    ran = CliRunner().invoke(app, ["shared", "--requests", "30", "--seed", str(SEED), "--json"])
    assert ran.exit_code == 0, ran.output
    told = json.loads(ran.stdout.splitlines()[-1])
    assert (told["engine"], told["seed"], told["plant"]) == ("shared", SEED, None)
    assert (told["wrong"], told["findings"], told["requests"] >= 30) == (0, [], True)
