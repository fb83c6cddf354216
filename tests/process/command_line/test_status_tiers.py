"""`rachis status --tiers` of a running service."""

import json
from pathlib import Path

import pytest

from command_line.status.overview import status
from control_plane.service.state import StateFile
from tests.fakes.cluster import DECODE, PREFILL, Cluster


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that nothing is folded which would not fit."""
    monkeypatch.setenv("COLUMNS", "300")


async def test_a_running_service_is_asked_by_the_command(
    empty: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await empty.add(PREFILL)
    await empty.add(DECODE, has_tiers=False)
    for _ in range(3):
        await empty.generate()
    state_file = StateFile(tmp_path)

    assert await status(empty.router.address, state_file, tiers=True, as_json=True) == 0
    told = {each["worker_id"]: each["tiers"] for each in json.loads(capsys.readouterr().out)["workers"]}
    assert told["decode-0"] is None
    prefill = told["prefill-0"]
    assert prefill["hit_ratio"] == {"device": round(8 / 15, 6), "host": 0.0}
    assert (prefill["saved_tokens"], prefill["blocks"]) == (8, {"device": 1, "host": 0})
    [prefix] = prefill["hottest_prefixes"]
    assert (prefix["tokens"], prefix["device_blocks"], prefix["frequency"]) == (4, 1, 3)

    assert await status(empty.router.address, state_file, tiers=True, as_json=False) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["prefill-0", "53.3%", "-", "8", "0.00", "0.00", "0", "0", "0"] in lines
    assert ["decode-0", "has", "no", "tiers"] in lines

    assert await status(empty.router.address, state_file, tiers=False, as_json=True) == 0
    assert "tiers" not in json.loads(capsys.readouterr().out)["workers"][0]
