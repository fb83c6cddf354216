"""`rachis status --decode` of a running service."""

import json
from pathlib import Path

import pytest

from cluster_core.errors import NotFoundError
from command_line.status.overview import status
from control_plane.service.state import StateFile
from tests.fakes.cluster import DECODE, PREFILL, Cluster, until


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that nothing is folded which would not fit."""
    monkeypatch.setenv("COLUMNS", "300")


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


async def test_a_running_service_is_asked_by_the_command(
    empty: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await empty.add(PREFILL)
    engine = (await empty.add(DECODE, forms_batches=True)).engine
    await empty.add(DECODE, "decode-1")
    engine.hold_before(1)
    calls = [empty.call(text, max_tokens=4) for text in ("hello you", "hello all", "other")]
    await until(lambda: sum(len(each.engine.jobs) for each in empty.workers[1:]) == 3)
    state_file = StateFile(tmp_path)

    assert await status(empty.router.address, state_file, decode=True, as_json=True) == 0
    told = {each["worker_id"]: each["decode"] for each in json.loads(capsys.readouterr().out)["workers"]}
    assert told["prefill-0"] is None and told["decode-1"] is None
    assert told["decode-0"]["running_requests"] == len(engine.jobs)
    assert told["decode-0"]["batch"]["groups"][0]["tokens"] in (4, 8)

    assert await status(empty.router.address, state_file, decode=True, worker="decode-0", as_json=False) == 0
    text = capsys.readouterr().out
    assert "decode-1" not in text
    assert ["decode-0", "greedy", "policy", str(len(engine.jobs)), "0", "0"] in [line[:6] for line in rows(text)]

    assert await status(empty.router.address, state_file, as_json=True) == 0
    assert "decode" not in json.loads(capsys.readouterr().out)["workers"][0]

    engine.resume()
    for call in calls:
        _ = [response async for response in call]


async def test_a_worker_that_is_not_there_is_told_with_those_that_are(cluster: Cluster, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no worker `decode-7`; there are: decode-0, prefill-0"):
        await status(cluster.router.address, StateFile(tmp_path), worker="decode-7", as_json=True)
