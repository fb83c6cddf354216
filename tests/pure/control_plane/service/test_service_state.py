"""The file that says what runs here: claimed by one process, read while that lives, gone with it."""

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest

from cluster_core.errors import ConfigError
from control_plane.service.state import ServiceState, StateFile, state_folder


def state_of(process: psutil.Process, service_id: str = "svc-1") -> ServiceState:
    return ServiceState(service_id, "127.0.0.1:7421", "127.0.0.1:7422", process.pid, process.create_time())


MINE = state_of(psutil.Process())


@pytest.fixture
def state_file(tmp_path: Path) -> StateFile:
    return StateFile(tmp_path / "state")


def test_nothing_is_read_where_nothing_was_claimed(state_file: StateFile) -> None:
    assert state_file.read() is None


def test_what_was_claimed_is_read_back_and_leaves_no_other_file(state_file: StateFile, tmp_path: Path) -> None:
    state_file.claim(MINE)

    assert state_file.read() == MINE
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["service.json"]


def test_the_same_process_may_claim_again_with_its_address(state_file: StateFile) -> None:
    state_file.claim(ServiceState("svc-1", "", "", MINE.pid, MINE.started))

    state_file.claim(MINE)

    assert state_file.read() == MINE


def test_another_running_service_keeps_the_file(state_file: StateFile) -> None:
    running = state_of(psutil.Process(os.getppid()), "svc-9")
    state_file.claim(running)

    with pytest.raises(ConfigError, match=f"svc-9 already runs .process {running.pid}, 127.0.0.1:7421"):
        state_file.claim(MINE)

    assert state_file.read() == running


@pytest.mark.parametrize("other", [{"process_began": 1}, {"machine": "another boot"}])
def test_a_process_that_took_over_the_number_of_a_dead_one_counts_as_none(
    state_file: StateFile, other: dict[str, object]
) -> None:
    state_file.claim(MINE)
    path = state_file.folder / "service.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | other))

    assert state_file.read() is None


def test_a_clock_that_is_set_ends_no_service(state_file: StateFile) -> None:
    """By that clock its process has begun at another time than was written."""
    running = replace(MINE, started=MINE.started - 100.0)
    state_file.claim(running)

    assert state_file.read() == running


@pytest.mark.parametrize(("set_back_s", "is_found"), [(0.0, True), (100.0, False)])
def test_a_file_that_says_nothing_but_the_time_goes_by_it(
    state_file: StateFile, set_back_s: float, is_found: bool
) -> None:
    """As files of before do."""
    state_file.folder.mkdir()
    table = asdict(MINE) | {"started": MINE.started - set_back_s}
    (state_file.folder / "service.json").write_text(json.dumps(table))

    assert (state_file.read() is not None) == is_found


@pytest.mark.parametrize("text", ["", "{", "[]", "7", "{}", '{"service_id": "x"}', '{"unknown": 1}'])
def test_a_damaged_file_counts_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "service.json").write_text(text)

    assert StateFile(tmp_path).read() is None


def test_clear_removes_the_own_file_only(state_file: StateFile) -> None:
    state_file.claim(MINE)

    state_file.clear(MINE.pid + 1)
    assert state_file.read() == MINE

    state_file.clear(MINE.pid)
    assert state_file.read() is None
    state_file.clear(MINE.pid)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "{}",
        "[]",
    ],
)
def test_clear_leaves_a_damaged_file_alone(tmp_path: Path, text: str) -> None:
    (tmp_path / "service.json").write_text(text)

    StateFile(tmp_path).clear(1)

    assert (tmp_path / "service.json").read_text() == text


def test_a_file_with_a_process_number_that_is_no_number_counts_as_none(tmp_path: Path) -> None:
    text = json.dumps({"service_id": "svc-1", "address": "", "pid": "1", "started": 0.0})
    (tmp_path / "service.json").write_text(text)

    assert StateFile(tmp_path).read() is None


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"RACHIS_STATE_DIR": "/a", "XDG_STATE_HOME": "/b"}, "/a"),
        ({"XDG_STATE_HOME": "/b"}, "/b/rachis"),
        ({}, str(Path.home() / ".local/state/rachis")),
    ],
)
def test_the_state_folder_is_the_given_one_or_the_users(environment: dict[str, str], folder: str) -> None:
    assert state_folder(environment) == Path(folder)
