"""Random sessions get the answers of fresh requests, on simulated engines and on a real one; planted bugs are found.

Short runs of `make fuzz`. A real engine has a process of its own: vLLM keeps what two of them would share.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any

import pytest

from tests.campaign.fuzz.planted import PLANTS
from tests.campaign.fuzz.simulated import play
from tests.campaign.fuzz.tally import Tally

pytestmark = pytest.mark.integration

SIMULATED_SESSIONS = 750
REAL_SESSIONS = 80
MOST_CONTROL_SESSIONS = 1500
SEED = 1
TIMEOUT_S = 240


def played(sessions: int, planted: AbstractContextManager[Any], **fixed: Any) -> Tally:
    """The sum over worlds until so many sessions were compared or something was wrong."""
    total = Tally()
    with planted:
        for tally in play(SEED, **fixed):
            total.add(tally)
            if total.wrong or total.sessions >= sessions:
                return total
    raise AssertionError("worlds have no end")


@pytest.mark.parametrize("v2", [False, True], ids=["v1", "v2"])
def test_simulated_sessions_answer_as_fresh_requests_do(v2: bool) -> None:
    tally = played(SIMULATED_SESSIONS, nullcontext(), v2=v2)
    assert not tally.wrong, tally.wrong
    assert min(tally.cancelled, tally.appends, tally.updates) > 0
    assert min(tally.swaps, tally.recomputes, tally.loads, tally.invalidated_tokens) > 0
    assert min(tally.copied_out, tally.copied_back, tally.promoted) > 0


@pytest.mark.parametrize("name", PLANTS)
def test_simulation_finds_a_planted_bug(name: str) -> None:
    assert played(MOST_CONTROL_SESSIONS, PLANTS[name].planted()).wrong, PLANTS[name].breaks


def test_the_same_seed_plays_the_same_worlds() -> None:
    def first_three(worlds: Iterator[Tally]) -> list[Tally]:
        return list(islice(worlds, 3))

    assert first_three(play(SEED)) == first_three(play(SEED))
    assert first_three(play(SEED)) != first_three(play(SEED + 1))


def test_real_sessions_answer_as_fresh_requests_do() -> None:
    told = fuzz("real", "--sessions", str(REAL_SESSIONS), "--seed", str(SEED))
    assert told["exit_code"] == 0, told["findings"]
    assert told["sessions"] >= REAL_SESSIONS
    assert min(told["cancelled"], told["appends"], told["updates"]) > 0
    assert min(told["swaps"], told["recomputes"], told["invalidated_tokens"]) > 0
    assert min(told["copied_out"], told["copied_back"], told["promoted"]) > 0


def test_real_engine_finds_planted_bugs() -> None:
    told = fuzz("controls", "real", "--seed", str(SEED))
    found = told["found_after_sessions"]
    assert set(found) == {name for name, plant in PLANTS.items() if plant.real}
    assert all(after is not None for after in found.values()), found
    assert told["exit_code"] == 0


def fuzz(*arguments: str) -> dict[str, Any]:
    """What `python -m tests.campaign.fuzz` tells, and its exit code."""
    command = [sys.executable, "-m", "tests.campaign.fuzz", *arguments, "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert ran.stdout, ran.stderr[-2000:]
    told: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return {**told, "exit_code": ran.returncode}
