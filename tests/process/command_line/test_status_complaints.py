"""`rachis status` says in sentences what is wrong with workers and requests."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rachis.v1 import worker_pb2 as wire

from cluster_core.engine_reports import EngineStatus
from command_line.status.overview import status
from control_plane.service.state import StateFile
from tests.fakes.cluster import DECODE, PREFILL, Cluster


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that nothing is folded which would not fit."""
    monkeypatch.setenv("COLUMNS", "300")


async def test_what_hangs_is_quarantined_or_poisoned_is_named(
    empty: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    await empty.add(PREFILL)
    decode = await empty.add(DECODE)
    state_file = StateFile(tmp_path)

    async def told() -> str:
        assert await status(empty.router.address, state_file, as_json=False) == 0
        return capsys.readouterr().out

    healthy = await told()
    assert "decode-0 " in healthy
    assert "memory of the router: prompts 0 of 1024 MiB, traces 0 of 16 MiB, recent prompts 0 of 64 MiB" in healthy
    assert not any(word in healthy for word in ("gets no requests", "blocks from use", "engines died"))

    said = decode.engine.status()
    ill = EngineStatus(replace(said.load, stalled_s=12.4, quarantined_blocks=31), said.counters)
    # What its engine says of itself; nothing of the stand-in can be made to hang and to answer.
    monkeypatch.setattr(decode.engine, "status", lambda: ill)
    monkeypatch.setattr(type(empty.parts.dispatcher.poison), "poisoned", lambda self, now_s: 2)

    lines = (await told()).splitlines()
    assert "requests that are refused because engines died of them: 2" in lines
    assert "decode-0 gets no requests: its engine has been in one step, command or copy for 12 s" in lines
    assert "decode-0 keeps 31 blocks from use: a pull that was given up is not over" in lines
    assert not any(line.startswith("prefill-0 ") and "requests:" in line for line in lines)
    assert await status(empty.router.address, state_file, as_json=True) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["poisoned_requests"] == 2
    [each] = [each for each in result["workers"] if each["pool"] == "decode"]
    assert (each["stalled_s"], each["quarantined_blocks"]) == (12.4, 31)
    assert [use["limit"] for use in result["memory"]] == [
        "router.max_prompt_mib", "tracing.memory_mib", "placement.recent_prompts_mib", "placement.explanations_mib",
        "index.max_entries",
    ]  # fmt: skip
    assert decode.record.state == wire.WORKER_STATE_READY
