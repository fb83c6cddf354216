"""The console over HTTP: its page, calls as the admin API answers them, and what is refused."""

import asyncio
import json
import socket

import pytest
from google.protobuf.json_format import ParseDict
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import worker_pb2 as wire

from control_plane.console.admin_calls import METHODS
from control_plane.console.pages import MOST_BODY_BYTES
from control_plane.console.streams import MOST_STREAMS
from tests.fakes.cluster import DECODE, PREFILL, Cluster, until
from tests.process.control_plane.access.conftest import Keyed
from tests.process.control_plane.console.calls import asked, called, opened

HOSTILE = ('"><img src=x onerror=alert(1)>', "<script>alert(1)</script>")


def address(cluster: Cluster) -> str:
    return cluster.router.metrics.address


async def ready(cluster: Cluster) -> Cluster:
    for pool in (PREFILL, DECODE):
        await cluster.add(pool)
    return cluster


async def test_the_page_is_served_to_everybody_and_runs_no_script_but_its_own(empty: Cluster) -> None:
    for path in ("/", "/static/app.js", "/static/console.css", "/?x=1"):
        answer = await asked(address(empty), path)
        assert answer.status == 200
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    "path",
    ["/static/", "/static/../pages.py", "/static/%2e%2e/pages.py", "/static/app.js/", "/static//etc/passwd", "/x"],
)
async def test_no_other_file_is_served(empty: Cluster, path: str) -> None:
    assert (await asked(address(empty), path)).status == 404


async def test_a_call_is_answered_as_the_admin_api_answers(empty: Cluster) -> None:
    cluster = await ready(empty)
    await cluster.generate("hello there", request_id="ask-1")
    pools = (await called(address(cluster), "GetPools")).json
    assert ParseDict(pools, admin.GetPoolsResponse()) == await cluster.admin.GetPools(admin.GetPoolsRequest())
    told = ParseDict((await called(address(cluster), "GetOverview", {"workers": 9})).json, admin.GetOverviewResponse())
    own = await cluster.admin.GetOverview(admin.GetOverviewRequest(workers=9))
    for moves in (told.router, own.router):
        moves.ClearField("uptime_s")
        moves.ClearField("cpu_s")
    assert told == own
    assert told.ttft.requests == 1 and [row.worker_id for row in told.workers] == ["decode-0", "prefill-0"]
    trace = (await called(address(cluster), "GetTrace", {"request_id": "ask-1"})).json
    assert trace["outcome"] == "finished" and sum(stage["duration_ms"] for stage in trace["answer"]["stages"]) > 0
    (placement,) = (await called(address(cluster), "ListPlacements", {"at_most": 5})).json["placements"]
    assert [decision["worker_id"] for decision in placement["decisions"]] == ["prefill-0", "decode-0"]


async def test_workers_that_are_named_are_told_alone(empty: Cluster) -> None:
    cluster = await ready(empty)
    told = (await called(address(cluster), "ListWorkers", {"worker_ids": ["decode-0", "nobody"]})).json
    assert [view["registration"]["worker_id"] for view in told["workers"]] == ["decode-0"]


async def test_what_is_not_found_and_what_is_no_call_are_told_apart(empty: Cluster) -> None:
    unknown = await called(address(empty), "GetTrace", {"request_id": "nobody"})
    assert unknown.status == 404 and "no trace of a request `nobody`" in unknown.error
    for path in ("/api/Generate", "/api/LookupPrefix", "/api/", "/api", "/metrics"):
        assert (await asked(address(empty), path, b"{}", "POST", content_type="application/json")).status == 404
    assert (await asked(address(empty), "/api/GetPools")).status == 404


async def test_bad_input_is_refused_in_a_sentence(empty: Cluster) -> None:
    answer = await called(address(empty), "ListRequests", {"running": "many"})
    assert answer.status == 400 and "is no ListRequestsRequest" in answer.error
    long = await asked(
        address(empty), "/api/GetPools", b"x" * (MOST_BODY_BYTES + 1), "POST", content_type="application/json"
    )
    assert long.status == 400 and f"{MOST_BODY_BYTES} are the most" in long.error


@pytest.mark.parametrize("length", ["9" * 5000, "-1", "many", "1e3"])
async def test_a_length_that_is_none_or_too_much_is_refused_whatever_comes(empty: Cluster, length: str) -> None:
    answer = await asked(
        address(empty), "/api/GetPools", b"{}", "POST", content_type="application/json", content_length=length
    )
    assert answer.status == 400 and "content-length" in answer.error


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"sec_fetch_site": "cross-site"},
        {"content_type": "text/plain"},
        {"host": "evil.example"},
    ],
)
async def test_the_page_of_somebody_else_changes_nothing(empty: Cluster, headers: dict[str, str]) -> None:
    cluster = await ready(empty)
    answer = await called(address(cluster), "DrainWorker", {"worker_id": "decode-0"}, **headers)
    assert answer.status == 403
    (decode, _) = (await cluster.admin.ListWorkers(admin.ListWorkersRequest())).workers
    assert decode.registration.state == wire.WORKER_STATE_READY


async def test_hostile_names_come_back_as_the_text_that_they_are(empty: Cluster) -> None:
    for name in HOSTILE:
        await empty.add(DECODE, name)
    answer = await called(address(empty), "GetOverview", {"workers": 9})
    assert answer.headers["content-type"] == "application/json"
    assert {row["worker_id"] for row in answer.json["workers"]} == set(HOSTILE)


async def test_each_call_needs_the_role_that_grpc_asks_for(keyed: Keyed) -> None:
    place = address(keyed.cluster)
    assert (await asked(place, "/")).status == 200
    for who, statuses in {
        "nobody": (401, 401), "generate": (403, 403), "observe": (200, 403), "operate": (200, 200),
    }.items():  # fmt: skip
        look = await called(place, "GetOverview", key=keyed.key[who])
        change = await called(place, "DrainWorker", {"worker_id": "decode-0"}, key=keyed.key[who])
        assert (look.status, change.status) == statuses, who
    stream = await opened(place, "WatchOverview", key=keyed.key["generate"])
    assert stream.status == 403
    stream.close()
    written = [(line["call"], line["key"], line["status"]) for line in keyed.written()]
    assert ("DrainWorker", "operate", "OK") in written and ("DrainWorker", "observe", "PERMISSION_DENIED") in written
    assert {line["address"] for line in keyed.written()} == {"127.0.0.1"}


async def test_a_key_that_is_not_good_is_refused_for_every_call(keyed: Keyed) -> None:
    for name in METHODS:
        answer = await called(address(keyed.cluster), name, key="rk-wrong")
        assert answer.status == 401, name


async def test_an_overview_comes_again_while_it_is_watched(empty: Cluster) -> None:
    cluster = await ready(empty)
    stream = await opened(address(cluster), "WatchOverview", {"workers": 5})
    events = stream.events()
    first = await asyncio.to_thread(next, events)
    await cluster.add(DECODE)
    later = first
    while len(later["overview"]["workers"]) == len(first["overview"]["workers"]):
        later = await asyncio.to_thread(next, events)
    assert {row["worker_id"] for row in later["overview"]["workers"]} == {"prefill-0", "decode-0", "decode-1"}
    stream.close()


async def test_streams_are_bounded_and_those_that_are_closed_make_room(
    empty: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The router is the fixture's, which all tests share: a stream says every second whether its reader is there.
    monkeypatch.setattr(empty.parts.overview, "_watch_interval_s", 0.1)
    place, registry = address(empty), empty.router.metrics.registry
    streams = [await opened(place, "WatchOverview") for _ in range(MOST_STREAMS)]
    assert registry.get_sample_value("rachis_console_streams") == MOST_STREAMS
    refused = await opened(place, "WatchOverview")
    assert refused.status == 429
    assert (await called(place, "GetOverview")).status == 200
    assert registry.get_sample_value("rachis_console_refused_streams_total") == 1
    for stream in (*streams, refused):
        stream.close()
    async with asyncio.timeout(60):
        while registry.get_sample_value("rachis_console_streams"):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_who_does_not_read_is_dropped_and_nothing_waits_for_it(
    empty: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nobody configures how long a write to a browser may take.
    monkeypatch.setattr("control_plane.console.pages.SEND_TIMEOUT_S", 0.2)
    for number in range(200):
        record = wire.WorkerRegistration(worker_id=f"w-{number}", generation=1, pool=DECODE, phase="x" * 400)
        empty.registry.write(record)
    await until(lambda: empty.router.membership.get("w-199") is not None)
    overview = empty.parts.overview
    # As above; buffers fill at once.
    monkeypatch.setattr(overview, "_watch_interval_s", 0.0)
    place, counts = address(empty), empty.router.metrics.registry
    host, _, port = place.rpartition(":")
    with socket.socket() as silent:
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        silent.connect((host, int(port)))
        body = json.dumps({"workers": 200}).encode()
        head = f"POST /api/WatchOverview HTTP/1.0\r\nhost: {place}\r\ncontent-type: application/json\r\n"
        silent.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        async with asyncio.timeout(60):
            while counts.get_sample_value("rachis_console_slow_readers_total") != 1:
                assert (await called(place, "GetIdentity")).status == 200
                await asyncio.sleep(0.05)
    assert counts.get_sample_value("rachis_console_streams") == 0


async def test_a_thousand_workers_are_told_in_a_bounded_answer(empty: Cluster) -> None:
    for number in range(1000):
        record = wire.WorkerRegistration(
            worker_id=f"decode-{number}", generation=1, pool=DECODE, state=wire.WORKER_STATE_READY
        )
        record.load.running_requests = 3
        empty.registry.write(record)
    await until(lambda: len(empty.router.membership.members()) == 1000)
    answer = await called(address(empty), "GetOverview", {"workers": 1000})
    assert len(answer.json["workers"]) == 200 and answer.json["unlisted_workers"] == 800
    assert answer.json["pools"][1]["running_requests"] == 3000
    assert answer.json["pools"][1]["workers"] == {"ready": 1000}
    assert len(answer.body) < 128 << 10
