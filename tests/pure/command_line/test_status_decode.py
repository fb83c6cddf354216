"""`rachis status --decode`, read by people in a hundred columns and by machines."""

from typing import Any

import pytest
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import worker_pb2 as wire

from command_line.status import overview
from command_line.status.decode import BATCH_ENTRIES, decode_of, print_decode
from tests.command import handed_over, rachis

LARGE = wire.DecodeReport(
    policy="q_learning",
    mode="fallback",
    running_requests=4096,
    loading_requests=4096,
    tip_tokens=131_072,
    working_set_tokens=10**9,
    waiting={"capacity": 99_999, "held": 9999, "prefix": 999},
    steps=10**9,
    batch_sum=4096 * 10**9,
    shared_tokens_sum=131_072 * 10**9,
    admissions={"fcfs": 10**9, "policy": 10**9, "overdue": 10**8, "idle": 1},
    lost_tokens=10**12,
    wait_s={"capacity": 10.0**7, "held": 10.0**7, "prefix": 10.0**7},
    longest_held_s=43_200.0,
    decisions=10**10,
    decision_s=10.0**6,
    probes=99_999,
    fallbacks=99_999,
)
LARGE_BATCH = wire.DecodeBatch(
    groups=[wire.PrefixGroup(hash="0123456789abcdef", tokens=131_072, running=4096, waiting=99_999)],
    waiting=[
        wire.WaitingRequest(
            request_id="r0123456789abcdef.2-01234567",
            prompt_tokens=131_072,
            waited_s=43_200.123456789,
            cause="capacity",
            shared_tokens=131_072,
            priority=-1000,
        )
    ],
    table=[
        wire.PolicyRow(
            batch="129 or more", loss="129 or more", peers="9 or more", adds=10**9, stops=10**9, add_value=-0.123456789
        )
    ],
    longest_wait_s={"held": 43_200.0},
)


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that nothing is folded which would not fit."""
    monkeypatch.setenv("COLUMNS", "300")


def worker(name: str, **fields: Any) -> dict[str, Any]:
    view = admin.WorkerView(**fields)
    pool = name.partition("-")[0]
    return {"worker_id": name, "pool": pool, "answered": view.HasField("load"), "decode": decode_of(view)}


def printed(capsys: pytest.CaptureFixture[str], *workers: dict[str, Any]) -> str:
    print_decode(workers)
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    return text


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_large_figures_fit_a_hundred_columns(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, worker("decode-10", load=wire.WorkerLoad(), decode=LARGE, batch=LARGE_BATCH))

    lines = rows(text)
    assert ["decode-10", "q_learning", "fallback", "4096", "4096", "110997", "131k", "1000M"] in lines
    assert [
        "decode-10",
        "4096.0",
        "131072",
        "2100M",
        "100M",
        "476.2",
        "43200.00",
        "s",
        "100",
        "us",
        "99999",
        "99999",
    ] in lines
    assert ["decode-10", "0123456789abcdef", "131072", "4096", "99999"] in lines
    assert ["decode-10", "held", "9999", "43200.00", "s", "10000000.00", "s"] in lines
    assert ["decode-10", "prefix", "999", "-", "10000000.00", "s"] in lines
    assert [
        "decode-10",
        "r0123456789abcdef.2-01234567",
        "131072",
        "43200.12",
        "s",
        "capacity",
        "131072",
        "-1000",
    ] in lines
    learned = ["129", "or", "more", "129", "or", "more", "9", "or", "more", "1000000000", "-0.1235", "1000000000", "-"]
    assert ["decode-10", *learned] in lines


def test_what_is_not_there_has_no_table(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(
        capsys,
        worker("decode-0", load=wire.WorkerLoad(), decode=wire.DecodeReport(policy="fcfs"), batch=wire.DecodeBatch()),
    )

    assert ["decode-0", "0.0", "0", "0", "0", "0.0", "0.00", "s", "0", "us", "0", "0"] in rows(text)
    for title in ("prefix groups", "why requests wait", "first requests", "learned"):
        assert title not in text


def test_who_tells_nothing_has_no_time_or_no_answer_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    load = wire.WorkerLoad()
    text = printed(
        capsys,
        worker("prefill-0", load=load),
        worker("decode-0", load=load),
        worker("decode-1"),
        worker("decode-2", load=load, decode=wire.DecodeReport(policy="greedy")),
    )

    assert "decode-0 does not form its batch by shared prefixes\n" in text
    assert "decode-1 did not answer\n" in text
    assert "decode-2 is busy: it had no time to tell of its batch, ask again\n" in text
    assert "prefill-0" not in text


def test_without_any_decode_worker_one_sentence_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, worker("prefill-0", load=wire.WorkerLoad())) == "there is no decode worker among them\n"


def test_the_command_passes_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = handed_over(monkeypatch, overview, "status")

    done = rachis("status", "--decode", "--worker", "decode-0", "--json")

    ((_, _, named),) = asked
    assert (done.exit_code, named) == (0, {"tiers": False, "decode": True, "worker": "decode-0", "as_json": True})


def test_so_many_entries_are_asked_for_as_workers_tell() -> None:
    assert 0 < BATCH_ENTRIES <= 100
