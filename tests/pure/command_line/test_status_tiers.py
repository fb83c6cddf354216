"""`rachis status --tiers`, read by people in eighty columns and by machines."""

from typing import Any

import pytest
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import worker_pb2 as wire

from command_line.status.tiers import print_tiers, tiers_of

LARGE = wire.TierReport(
    prompt_tokens=10**12,
    device_hit_tokens=10**12 - 1,
    host_hit_tokens=10**11,
    host_capacity_blocks=10**6,
    copied_out_bytes=9999 << 30,
    copied_back_bytes=9999 << 30,
    refused_offers={"frequency": 10**9, "host_locked": 10**8 - 1},
    promoted_used_blocks=10**8 - 1,
    promoted_wasted_blocks=10**8 - 1,
)
PREFIX = wire.HotPrefix(
    hash="0123abcd", tokens=131072, device_blocks=8192, host_blocks=8192, frequency=10**6, priority=-1234.56789
)


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that nothing is folded which would not fit."""
    monkeypatch.setenv("COLUMNS", "300")


def worker(name: str, **fields: Any) -> dict[str, Any]:
    view = admin.WorkerView(**fields)
    return {"worker_id": name, "answered": view.HasField("load"), "tiers": tiers_of(view)}


def printed(capsys: pytest.CaptureFixture[str], *workers: dict[str, Any]) -> str:
    print_tiers(workers)
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    return text


def test_large_figures_fit_eighty_columns(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(
        capsys,
        worker("prefill-10", load=wire.WorkerLoad(), tiers=LARGE, hottest=wire.HottestPrefixes(prefixes=[PREFIX])),
    )

    lines = [line.split() for line in text.splitlines()]
    assert ["prefill-10", "100.0%", "10.0%", "1099G", "9999.00", "9999.00", "1099M", "99999k", "99999k"] in lines
    assert ["prefill-10", "0123abcd", "131072", "8192", "8192", "1000000", "-1235"] in lines


def test_who_has_no_tiers_no_host_memory_no_time_or_no_answer_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    load, nothing = wire.WorkerLoad(), wire.TierReport()
    text = printed(
        capsys,
        worker("decode-0", load=load),
        worker("decode-1"),
        worker("prefill-0", load=load, tiers=nothing),
        worker("prefill-1", load=load, tiers=nothing, hottest=wire.HottestPrefixes()),
    )

    assert "decode-0 has no tiers\n" in text
    assert "decode-1 did not answer\n" in text
    assert "prefill-0 is busy: it had no time to look for its hottest prefixes, ask again\n" in text
    assert "prefill-1 has no prefix cached\n" in text
    assert ["prefill-0", "0.0%", "-", "0"] in [line.split()[:4] for line in text.splitlines()]
    assert "\nhottest prefixes" not in text
