"""What a policy learns is saved, loaded again, and never in the way."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.campaign.fuzz.simulated_engine import BLOCK_SIZE, SimulatedEngine, SteppedClock
from tests.integration.decode_scheduler.requests import SETTINGS, MakeEngine, prompt, until

pytestmark = pytest.mark.integration


def teach(engine: SimulatedEngine, clock: SteppedClock) -> None:
    """Enough steps with strangers waiting for a learner to learn."""
    for number in range(12):
        engine.add(f"r{number}", prompt((number % 2, 6), (number, 1)), 40)
    until(engine, lambda: not engine.scheduler.requests, most_turns=3000)


@pytest.mark.parametrize("policy", ["bandit", "q_learning"])
@pytest.mark.parametrize("depth", [1, 2])
def test_what_was_learned_is_saved_at_shutdown_and_loaded_again(
    make_engine: MakeEngine, clock: SteppedClock, tmp_path: Path, policy: str, depth: int
) -> None:
    settings = replace(SETTINGS, policy=policy, policy_folder=str(tmp_path))
    engine = make_engine(depth=depth, decode=settings)
    teach(engine, clock)
    learned = engine.scheduler.decode_batch(1).table
    assert learned
    engine.scheduler.shutdown()
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_text())["policy"] == policy
    assert make_engine(depth=depth, decode=settings).scheduler.decode_batch(1).table == learned
    # For another chunk the same numbers would be of no use.
    other = make_engine(depth=depth, decode=replace(settings, chunk_tokens=4 * BLOCK_SIZE))
    assert other.scheduler.decode_batch(1).table == ()


def test_a_table_is_saved_now_and_then(make_engine: MakeEngine, clock: SteppedClock, tmp_path: Path) -> None:
    engine = make_engine(decode=replace(SETTINGS, policy="bandit", policy_folder=str(tmp_path), save_interval_s=0.2))
    teach(engine, clock)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("content", ["", "{}", "[1", '{"format": 0}'])
def test_a_file_of_no_use_is_moved_aside_and_the_table_starts_empty(
    make_engine: MakeEngine, clock: SteppedClock, tmp_path: Path, content: str
) -> None:
    settings = replace(SETTINGS, policy="bandit", policy_folder=str(tmp_path))
    first = make_engine(decode=settings)
    teach(first, clock)
    first.scheduler.shutdown()
    (file,) = tmp_path.iterdir()
    file.write_text(content)
    engine = make_engine(decode=settings)
    assert engine.scheduler.decode_batch(1).table == ()
    (aside,) = tmp_path.iterdir()
    assert aside.name != file.name
    assert aside.read_text() == content
    teach(engine, clock)
    engine.scheduler.shutdown()
    assert file.exists()


def test_a_folder_that_cannot_be_written_stops_nothing(
    make_engine: MakeEngine, clock: SteppedClock, tmp_path: Path
) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    engine = make_engine(decode=replace(SETTINGS, policy="bandit", policy_folder=str(in_the_way / "folder")))
    teach(engine, clock)
    engine.scheduler.shutdown()
    assert len(engine.answers) == 12
