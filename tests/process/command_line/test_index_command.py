"""`rachis index` and `rachis placement`, read by people in a hundred columns and by machines."""

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from rachis import text_prompt, token_prompt
from rachis.v1 import admin_pb2 as admin

from command_line import index as index_command
from command_line import main
from command_line import placement as placement_command
from command_line.generate import generate
from command_line.placement import REASONS
from command_line.status.overview import status
from control_plane.placement.by_objective import Way
from control_plane.placement.disaggregation import Reason
from control_plane.placement.objective_placer import REFUSED, REFUSED_FOR_TPOT
from control_plane.service.state import StateFile
from kv_transfer.blocks import Tier
from kv_transfer.claims.claims import ClaimChange
from tests.command import handed_over, rachis
from tests.fakes.cluster import DECODE, PREFILL, Cluster, named
from tests.fakes.indexed_cluster import CHUNK, PROMPT, access, cache, index_of, indexed_cluster

TOKENS = len(PROMPT) // CHUNK * CHUNK
_IN_TABLES = re.compile(r"(worker|\w+-\d+)  ")
# The widest figures that a large cluster has.
LARGE = admin.PlacementDecision(
    pool=DECODE,
    policy="hotness",
    prompt_tokens=131_072,
    max_tokens=8192,
    terms=[admin.PlacementTerm(name=name, weight=0.25) for name in ("affinity", "pull", "room", "memory")],
    candidates=[
        admin.PlacementCandidate(
            worker_id=f"decode-{number}",
            passed=number < 100,
            score=0.123456789,
            terms=dict.fromkeys(("affinity", "pull", "room", "memory"), 0.123456789),
            device_tokens=131_072,
            host_tokens=131_072,
            shared_tokens=131_072,
            sharers=999,
            in_flight_requests=1024,
            in_flight_tokens=10**7,
            queue_s=99.9,
        )
        for number in (99, 100)
    ],
    worker_id="decode-99",
    equals=64,
)


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that nothing is folded which would not fit."""
    monkeypatch.setenv("COLUMNS", "300")


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with indexed_cluster() as cluster:
        yield cluster


def read(capsys: pytest.CaptureFixture[str]) -> str:
    text: str = capsys.readouterr().out
    # Sentences may be longer: a terminal folds them.
    assert all(len(line) <= 100 for line in text.splitlines() if _IN_TABLES.match(line))
    return text


def read_json(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return told


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


async def test_the_hottest_prefixes_are_a_table_and_without_any_a_sentence(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    address = cluster.router.address
    await index_command.top(address, 20, as_json=False)
    assert read(capsys) == "no prompt of a chunk or more has been asked for yet\n"

    for number in range(2):
        cache(named(cluster, f"prefill-{number}"), PROMPT)
    cache(named(cluster, "decode-0"), PROMPT, tier=Tier.HOST)
    access(cluster, PROMPT, 3)

    await index_command.top(address, 20, as_json=False)
    row = rows(read(capsys))[1]
    assert row[1] == str(TOKENS) and row[3:] == ["prefill-0,", "prefill-1", "decode-0"]

    await index_command.top(address, 20, as_json=True)
    (prefix,) = read_json(capsys)["prefixes"]
    assert (prefix["name"], prefix["tokens"]) == (row[0], TOKENS)
    assert (prefix["device_workers"], prefix["host_workers"]) == (["prefill-0", "prefill-1"], ["decode-0"])
    assert prefix["requests_per_s"] > 0


def asked(text: str, cache_salt: str) -> admin.LookupPrefixRequest:
    return admin.LookupPrefixRequest(prompt=text_prompt(text), cache_salt=cache_salt)


async def test_a_lookup_tells_who_has_how_much_and_who_would_get_it(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cache(named(cluster, "prefill-1"), PROMPT[:64])
    cache(named(cluster, "prefill-1"), PROMPT, tier=Tier.HOST)

    await index_command.lookup(cluster.router.address, asked(PROMPT, ""), as_json=False)
    text = read(capsys)
    assert text.startswith(f"{len(PROMPT)} tokens, {TOKENS // CHUNK} chunks of {CHUNK}; 0 requests/s ask for all")
    assert ["prefill-1", "prefill", "1", "64", "0", str(TOKENS - 64)] in rows(text)
    assert "the prefill pool would choose prefill-1 now (hotness)\n" in text
    assert "the decode pool would choose decode-0 now (hotness)\n" in text

    await index_command.lookup(cluster.router.address, asked(PROMPT, "salted"), as_json=True)
    told = read_json(capsys)
    assert [each["device_tokens"] for each in told["workers"]] == [0, 0, 0]
    assert [choice["pool"] for choice in told["choices"]] == ["prefill", "decode"]


async def test_a_lookup_says_so_where_the_index_can_know_nothing_or_nobody_may_get_it(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    index_of(cluster).leave("prefill-0")
    await cluster.unregister(named(cluster, "decode-0"))

    await index_command.lookup(cluster.router.address, asked("short", ""), as_json=False)

    text = read(capsys)
    assert f"5 tokens, less than one chunk of {CHUNK}: the index knows nothing of such prompts\n" in text
    assert "the decode pool has nobody who may get it now\n" in text
    assert "not in the index" in text
    assert "drawn from 2 equals" in text


async def test_a_check_passes_where_the_index_says_the_truth_and_fails_with_names_where_not(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    address = cluster.router.address
    cache(named(cluster, "prefill-0"), PROMPT)
    assert await index_command.check(address, as_json=False) == 0
    text = read(capsys)
    assert ["prefill-0", "device", str(TOKENS // CHUNK), "0", "0"] in [row[:5] for row in rows(text)]
    assert text.endswith("no claim is untrue\n")

    index_of(cluster).apply("prefill-0", ClaimChange(host_stored=np.array([0xABCDEF << 40], dtype=np.uint64)))
    assert await index_command.check(address, as_json=False) == 1
    text = read(capsys)
    assert ["prefill-0", "host", "0", "0", "1", "abcdef00"] in [row[:6] for row in rows(text)]
    assert text.endswith("1 claims are untrue\n")

    assert await index_command.check(address, as_json=True) == 1
    told = read_json(capsys)
    assert (told["untrue"], told["unanswered"]) == (1, 0)
    assert told["workers"][1]["host"]["untrue_names"] == ["abcdef00"]


async def test_a_worker_that_cannot_be_compared_does_not_make_a_check_fail_and_is_told(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    await named(cluster, "prefill-0").crash()

    assert await index_command.check(cluster.router.address, as_json=False) == 0

    text = read(capsys)
    assert "\nprefill-0 could not be compared: " in text
    assert text.endswith("no claim of the others is untrue\n")


async def test_a_check_that_compares_nothing_fails(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    for worker in cluster.workers:
        await worker.crash()
    assert await index_command.check(cluster.router.address, as_json=False) == 1
    assert read(capsys).endswith("no worker could be compared\n")
    for worker in cluster.workers:
        await cluster.unregister(worker)
    assert await index_command.check(cluster.router.address, as_json=True) == 1
    assert read_json(capsys)["workers"] == []


async def test_the_state_of_the_index_is_told_and_its_alarms_in_sentences(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    response = admin.GetIndexStatusResponse(
        entries=123_456_789,
        capacity_entries=10**9,
        bytes=16 * 10**9,
        dropped=10**9,
        chunk_tokens=128,
        staleness_s=42.5,
        stale=True,
        workers=[
            admin.WorkerFeedStatus(
                worker_id=f"prefill-{number}",
                generation=1_790_000_000_123,
                sequence=10**9,
                lag_batches=9999,
                silent=True,
            )
            for number in range(6)
        ],
        batches=10**9,
        keys=10**12,
        load_only_decisions=10**7,
        disaggregation={reason.value: 10**7 for reason in Reason},
    )
    # Figures that no small cluster has.
    monkeypatch.setattr(cluster.parts.queries, "status", lambda: response)

    await index_command.index_status(cluster.router.address, as_json=False)
    text = read(capsys)
    assert text.startswith("index: 123M of 1000M chunks of 128 tokens, 1000000000 forgotten for hotter ones, 6 workers")
    assert "the index is 42 s old and not believed: placement uses load alone\n" in text
    assert "finish requests and tell of no block: prefill-0, prefill-1, prefill-2 and 3 more\n" in text
    assert "not in sync: prefill-0, prefill-1, prefill-2 and 3 more\n" in text
    assert ["prefill-5", "1790000000123", "1000000000", "9999", "no", "yes"] in rows(text)

    await index_command.index_status(cluster.router.address, as_json=True)
    told = read_json(capsys)
    assert (told["stale"], told["staleness_s"], told["counts"]["batches"]) == (True, 42.5, 10**9)

    assert await status(cluster.router.address, StateFile(tmp_path), as_json=False) == 0
    text = capsys.readouterr().out
    assert "index: 123M of 1000M chunks" in text and "placement uses load alone" in text
    assert await status(cluster.router.address, StateFile(tmp_path), as_json=True) == 0
    assert read_json(capsys)["index"]["entries"] == 123_456_789


async def test_a_placement_is_found_by_the_id_that_generate_told(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    address = cluster.router.address
    cache(named(cluster, "prefill-1"), PROMPT)
    sampling = {"max_tokens": 4, "temperature": 0.0}
    await generate(address, text_prompt(PROMPT), sampling, request_id="mine", timeout_s=60, as_json=True)
    cluster.calls += 1
    assert read_json(capsys)["request_id"] == "mine"
    await generate(address, text_prompt(PROMPT), sampling, request_id="mine too", timeout_s=60, as_json=False)
    cluster.calls += 1
    assert capsys.readouterr().err.endswith("request mine too\n")

    asked = admin.ExplainPlacementRequest(request_id="mine")
    await placement_command.explain(address, asked, as_json=False)
    text = read(capsys)
    assert f"prefill: prefill-1 by hotness, for {len(PROMPT)} prompt tokens and at most 4 more\n" in text
    assert " by itself for " in text and " disaggregated\n" in text
    assert "score = 1 ttft\n" in text
    table = [row for row in rows(text) if row and row[0].startswith("prefill-")]
    assert [(row[0], row[3]) for row in table] == [("prefill-1", str(TOKENS)), ("prefill-0", "0")]
    assert float(table[0][1]) > float(table[1][1])

    await placement_command.explain(address, asked, as_json=True)
    told = read_json(capsys)
    assert told["request_id"] == "mine"
    assert [decision["worker_id"] for decision in told["decisions"]] == ["prefill-1", "decode-0"]
    assert set(told["prices"]) == {"local_s", "remote_s", "remainder_tokens"}
    assert told["decisions"][0]["terms"] == [{"name": "ttft", "weight": 1.0}]


async def test_a_placement_that_was_not_asked_for_is_explained_as_it_would_be(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = placement_command.supposed(text_prompt(PROMPT), "", "", 16)

    await placement_command.explain(cluster.router.address, asked, as_json=True)

    told = read_json(capsys)
    assert told["request_id"] is None
    assert [(each["pool"], each["max_tokens"]) for each in told["decisions"]] == [("prefill", 16), ("decode", 16)]
    assert [each["equals"] for each in told["decisions"]] == [2, 1]


def test_large_figures_of_a_placement_fit_a_hundred_columns(capsys: pytest.CaptureFixture[str]) -> None:
    response = admin.ExplainPlacementResponse(
        request_id="r" * 40,
        decisions=[LARGE, admin.PlacementDecision(pool=PREFILL, policy="least_loaded", load_only=True)],
        disaggregation="prefill_slow",
        prices=admin.DisaggregationPrices(local_s=123.456, remote_s=0.0123, remainder_tokens=131_072),
    )

    placement_command.print_explanation(placement_command.explanation_of(response))

    text = read(capsys)
    figures = ["131k", "131k", "1024", "131k", "x", "999"]
    assert ["decode-99", "0.123", *["0.123"] * 4, *figures] in rows(text)
    assert "score = 0.25 affinity + 0.25 pull + 0.25 room + 0.25 memory\n" in text
    assert ["decode-100", "left", "out"] in [row[:3] for row in rows(text)]
    assert "decode: decode-99 by hotness, drawn from 64 equals, for 131072 prompt tokens" in text
    assert "prefill: no worker was usable for 0 prompt tokens" in text
    assert "123.46 s by itself for 131072 tokens, 12.3 ms disaggregated" in text


def test_every_reason_is_put_into_words() -> None:
    by_objectives = {way.value for way in Way} | {REFUSED, REFUSED_FOR_TPOT}
    assert set(REASONS) == {reason.value for reason in Reason} | by_objectives


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (["index", "lookup"], "give a prompt, - for standard input, or --tokens"),
        (["index", "lookup", "--tokens", "1,x"], "must be whole numbers"),
        (["placement", "explain"], "give either the id of a request, or --prompt or --tokens"),
        (["placement", "explain", "mine", "--prompt", "text"], "give either the id of a request, or --prompt"),
        (["placement", "explain", "--prompt", "text", "--max-tokens", "-1"], "must be from 0 to"),
        (["index", "top", "-n", "0"], "Invalid value for '-n'"),
    ],
)
def test_mistakes_are_told_in_a_sentence(
    command: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["rachis", *command, "--address", "127.0.0.1:1"])

    with pytest.raises(SystemExit) as ended:
        main.run()

    printed = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert (ended.value.code, told in printed) == (2, True)
    assert "Traceback" not in printed


def test_a_service_that_does_not_answer_is_told_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["rachis", "index", "check", "--address", "127.0.0.1:1"])

    with pytest.raises(SystemExit) as ended:
        main.run()

    printed = capsys.readouterr().err
    assert ended.value.code == 1
    assert grpc.StatusCode.UNAVAILABLE.name in printed and "Traceback" not in printed


def test_commands_pass_their_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    top, lookup, status = (handed_over(monkeypatch, index_command, each) for each in ("top", "lookup", "index_status"))
    check = handed_over(monkeypatch, index_command, "check", 1)
    explain = handed_over(monkeypatch, placement_command, "explain")
    where = ["--address", "host:1", "--json"]

    codes = [
        rachis(*command, *where).exit_code
        for command in (
            ["index", "top", "-n", "7"],
            ["index", "lookup", "text", "--salt", "tenant", "--model", "sql"],
            ["index", "check"],
            ["index", "status"],
            ["placement", "explain", "mine"],
            ["placement", "explain", "--tokens", "1,2", "--max-tokens", "9", "--cache-salt", "tenant"],
        )
    ]

    as_json = {"as_json": True}
    supposed = admin.SupposedRequest(prompt=token_prompt([1, 2]), cache_salt="tenant", max_tokens=9)
    looked_up = admin.LookupPrefixRequest(prompt=text_prompt("text"), cache_salt="tenant", model="sql")
    assert codes == [0, 0, 1, 0, 0, 0]
    assert top == [("host:1", 7, as_json)]
    assert lookup == [("host:1", looked_up, as_json)]
    assert check == status == [("host:1", as_json)]
    assert explain == [
        ("host:1", admin.ExplainPlacementRequest(request_id="mine"), as_json),
        ("host:1", admin.ExplainPlacementRequest(supposed=supposed), as_json),
    ]
