"""Where commands find a service that runs here: prompts at one address, administration at another."""

from pathlib import Path

import psutil
import pytest

from cluster_core.errors import ConfigError
from command_line.options import admin_address, running_address, state_file
from control_plane.service.state import ServiceState


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RACHIS_STATE_DIR", str(tmp_path))


def runs(address: str, admin: str) -> None:
    process = psutil.Process()
    state_file().claim(ServiceState("svc-1", address, admin, process.pid, process.create_time()))


def test_a_service_that_runs_here_is_found_at_both() -> None:
    runs("127.0.0.1:7421", "127.0.0.1:7422")
    assert (running_address(None), admin_address(None)) == ("127.0.0.1:7421", "127.0.0.1:7422")


def test_an_address_that_is_given_is_taken() -> None:
    runs("127.0.0.1:7421", "127.0.0.1:7422")
    assert (running_address("far:1"), admin_address("far:1")) == ("far:1", "far:1")


def test_where_none_runs_or_one_is_starting_the_option_is_named() -> None:
    for find in (running_address, admin_address):
        with pytest.raises(ConfigError, match="no service runs here") as raised:
            find(None)
        assert raised.value.field == "--address"
    runs("", "")
    with pytest.raises(ConfigError, match="no service runs here"):
        admin_address(None)


def test_the_file_of_a_service_that_has_one_address_is_read(tmp_path: Path) -> None:
    runs("127.0.0.1:7421", "127.0.0.1:7422")
    file = tmp_path / "service.json"
    file.write_text(file.read_text().replace(', "admin_address": "127.0.0.1:7422"', ""))
    assert admin_address(None) == "127.0.0.1:7421"
