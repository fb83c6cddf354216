"""Logs of a running service: what stands in them of a request, who may read them, and a disk that is full."""

import asyncio
import errno
import json
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import worker_pb2 as wire
from rachis.v1 import worker_pb2_grpc

from cluster_core import event_log
from cluster_core.engine_jobs import EngineJob, EngineOutput
from cluster_core.event_log import EventHandler, LogEvent, LogRules, logged
from cluster_core.log_files import LogQuery, Told, latest
from cluster_core.log_reader import MOST_QUERIES
from control_plane.fleet import service_logs
from control_plane.fleet.membership import Membership
from control_plane.fleet.service_logs import ServiceLogs, beside
from tests.fakes.cluster import DECODE, PREFILL, Cluster, running_cluster
from tests.fakes.engine import FakeEngine
from worker_runtime.own_logs import no_logs

SECRET = "the-prompt-that-nobody-else-may-read"


@asynccontextmanager
async def logging_cluster(folder: Path, level: str = "DEBUG") -> AsyncIterator[Cluster]:
    """A service whose router writes a log of its own."""
    with logged("svc-test", "router", LogRules(level, "json"), folder / "router.log"):
        async with running_cluster() as cluster:
            await cluster.add(PREFILL)
            await cluster.add(DECODE)
            yield cluster


async def told(cluster: Cluster, **query: object) -> admin.GetLogsResponse:
    answer: admin.GetLogsResponse = await cluster.admin.GetLogs(
        admin.GetLogsRequest(query=wire.LogQuery(**query))  # type: ignore[arg-type]
    )
    return answer


async def test_the_log_says_of_a_request_how_it_ended_under_its_id_and_that_of_its_trace(tmp_path: Path) -> None:
    async with logging_cluster(tmp_path) as cluster:
        await cluster.generate(request_id="ask-1")
        await cluster.generate(request_id="ask-2")
        trace = await cluster.admin.GetTrace(admin.GetTraceRequest(request_id="ask-2"))

        (event,) = (await told(cluster, request_id="ask-2", level="INFO")).events
        assert (event.message, event.process, event.level) == ("request finished", "router", "INFO")
        assert event.trace_id == trace.trace_id
        assert (await told(cluster, request_id=trace.trace_id, level="INFO")).events == [event]
        assert not (await told(cluster, request_id="ask-3")).events


async def test_a_session_is_logged_under_the_id_that_it_was_given(tmp_path: Path) -> None:
    async with logging_cluster(tmp_path) as cluster:
        session = cluster.session()
        await session.open()
        await session.finish()
        await session.answer()
        trace = await cluster.admin.GetTrace(admin.GetTraceRequest())
        assert await own_events(cluster, trace.request_id) == ["session finished"]

        own = cluster.session()
        await own.open(request_id="chat of the 9th]")
        await own.finish()
        await own.answer()
        assert await own_events(cluster, "chat of the 9th]") == ["session finished"]


async def own_events(cluster: Cluster, request_id: str) -> list[str]:
    return [event.message for event in (await told(cluster, request_id=request_id, level="INFO")).events]


def says_so(engine: FakeEngine) -> None:
    """From now on it logs of each job, on a thread of its own and under the only name that it knows: vLLM's."""
    generate = engine.generate

    def generated(job: EngineJob) -> AsyncIterator[EngineOutput]:
        names = {"request_id": f"{job.request_id}-0a1b2c3d"}
        thread = threading.Thread(
            target=lambda: logging.getLogger("kv_transfer.a_part").warning("its pull is overdue", extra=names)
        )
        thread.start()
        thread.join()
        return generate(job)

    # The engine has no port for what it logs: only vLLM's do.
    engine.generate = generated  # type: ignore[method-assign]


async def test_what_workers_log_of_a_request_is_found_under_the_id_that_its_client_gave(tmp_path: Path) -> None:
    async with logging_cluster(tmp_path) as cluster:
        for worker in cluster.workers:
            says_so(worker.engine)
        await cluster.generate(request_id="ask-1")
        await cluster.generate(request_id="ask-2")
        session = cluster.session()
        await session.open(request_id="ask-3")
        await session.finish()
        await session.answer()
        trace = await cluster.admin.GetTrace(admin.GetTraceRequest(request_id="ask-2"))
        # The prompt of a session is no job that is generated.
        for name, workers in (("ask-2", 2), (trace.trace_id, 2), ("ask-3", 1)):
            events = (await told(cluster, request_id=name, level="WARNING")).events
            assert [event.message for event in events] == ["its pull is overdue"] * workers, name
        assert "0a1b2c3d" not in (tmp_path / "router.log").read_text()


async def test_a_defect_of_a_worker_is_logged_there_under_the_id_that_its_client_gave(tmp_path: Path) -> None:
    def defect(job: EngineJob) -> AsyncIterator[EngineOutput]:
        raise ZeroDivisionError("a defect")

    async with logging_cluster(tmp_path) as cluster:
        # A defect is planted where the worker's own code would have it.
        cluster.workers[0].engine.generate = defect  # type: ignore[method-assign]
        with pytest.raises(grpc.aio.AioRpcError):
            await cluster.generate(request_id="ask-1", timeout_s=5)
        events = (await told(cluster, request_id="ask-1", level="ERROR")).events
        assert {event.logger for event in events} >= {"worker_runtime.service"}


async def test_a_level_that_there_is_none_of_is_refused(tmp_path: Path) -> None:
    async with logging_cluster(tmp_path) as cluster:
        with pytest.raises(grpc.aio.AioRpcError, match=r"query\.level: must be one of DEBUG, INFO") as refused:
            await told(cluster, level="error")
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_nothing_of_prompts_answers_and_token_ids_is_in_the_log_at_any_level(tmp_path: Path) -> None:
    async with logging_cluster(tmp_path) as cluster:
        answer = await cluster.generate(SECRET)
        session = cluster.session()
        await session.open()
        await session.append(SECRET)
        await session.finish()
        await session.answer()
        with pytest.raises(grpc.aio.AioRpcError):
            await cluster.generate("defect", max_tokens=8)
        with pytest.raises(grpc.aio.AioRpcError):
            await cluster.generate(SECRET, max_tokens=10**6)
    text = (tmp_path / "router.log").read_text()
    assert "request finished" in text and "it failed on a defect" in text
    assert SECRET not in text
    ids = [token for each in answer for token in each.delta.token_ids]
    assert ids and ", ".join(map(str, ids)) not in text
    assert ", ".join(map(str, SECRET.encode()[:4])) not in text


class Full:
    """A stream on a full disk."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def flush(self) -> None:
        pass


async def test_a_full_disk_is_counted_and_requests_go_on(tmp_path: Path) -> None:
    full = EventHandler("svc-test", "router", as_json=True, stream=Full())
    async with logging_cluster(tmp_path) as cluster:
        logging.getLogger().addHandler(full)
        try:
            for number in range(3):
                assert (await cluster.generate(request_id=f"ask-{number}"))[-1].HasField("completion")
            assert event_log.lost_lines() == full.lost >= 3
            lost = await asyncio.to_thread(
                cluster.router.metrics.registry.get_sample_value, "rachis_router_log_lines_lost_total"
            )
            assert lost is not None and lost >= 3
        finally:
            logging.getLogger().removeHandler(full)
        # The other streams went on.
        assert len((await told(cluster, level="INFO", request_id="ask-2")).events) == 1


async def test_workers_of_each_host_are_asked_and_a_host_that_does_not_answer_is_named(tmp_path: Path) -> None:
    written = LogEvent(1, "ERROR", "svc-test", "prefill-9", "a.part", "its last words", "ask-1")
    async with logging_cluster(tmp_path) as cluster:
        lost = await cluster.add(DECODE)
        for worker, node in zip(cluster.workers, ("h1", "h2", "h3"), strict=True):
            worker.record.node = node
            await cluster.register(worker.record)
        cluster.workers[0].logs = lambda query: latest([written], query)
        await lost.crash()

        answer = await told(cluster, level="ERROR")
        (event,) = [event for event in answer.events if event.process == "prefill-9"]
        assert (event.node, event.message, event.request_id) == ("h1", "its last words", "ask-1")
        (missing,) = answer.missing
        assert missing.startswith("the logs of h3 cannot be read: ")


async def test_events_of_the_router_and_of_workers_are_one_story(tmp_path: Path) -> None:
    async with logging_cluster(tmp_path) as cluster:
        logging.getLogger("control_plane.a_part").error("at the router")
        early = LogEvent(1, "ERROR", "svc-test", "prefill-0", "a.part", "long ago")
        late = LogEvent(1 << 42, "ERROR", "svc-test", "prefill-0", "a.part", "by a clock that is ahead")
        # Both are of one host: one of them is asked.
        for worker in cluster.workers:
            worker.logs = lambda query: latest([late, early], query)
        events = (await told(cluster, level="ERROR")).events
        # What another test has left in this process is told by asyncio, at any time.
        own = [event.message for event in events if event.logger != "asyncio"]
        assert own == ["long ago", "at the router", "by a clock that is ahead"]
        assert [event.message for event in (await told(cluster, level="ERROR", most_events=1)).events] == [
            "by a clock that is ahead"
        ]


async def test_hosts_whose_clocks_differ_are_asked_each_from_its_own_time_and_say_what_they_left_out(
    tmp_path: Path,
) -> None:
    async with logging_cluster(tmp_path) as cluster:
        asked: dict[str, int] = {}
        for worker, node in zip(cluster.workers, ("h1", "h2"), strict=True):
            worker.record.node = node
            await cluster.register(worker.record)

            def logs(query: LogQuery, node: str = node) -> Told[LogEvent]:
                asked[node] = query.since_ms
                return Told(
                    [LogEvent(1, "ERROR", "svc-test", node, "a.part", f"{number} of {node}") for number in "12"], 5
                )

            worker.logs = logs
        request = admin.GetLogsRequest(query=wire.LogQuery(since_unix_ms=7, most_events=3), since_unix_ms={"h2": 9})
        answer = await cluster.admin.GetLogs(request)
        assert asked == {"h1": 7, "h2": 9}
        sources = {source.node: source for source in answer.sources}
        assert sources.keys() == {"", "h1", "h2"} and all(source.read_unix_ms for source in sources.values())
        told = [event.node for event in answer.events]
        assert {node: sources[node].left_out + told.count(node) for node in ("h1", "h2")} == {"h1": 7, "h2": 7}


async def test_a_worker_that_is_asked_too_often_refuses_and_its_host_is_named(tmp_path: Path) -> None:
    async with logging_cluster(tmp_path) as cluster:
        worker, other = cluster.workers
        other.record.node = "h2"
        worker.record.node = "h1"
        for each in cluster.workers:
            await cluster.register(each.record)
        began, go_on = threading.Event(), threading.Event()

        def slow(query: LogQuery) -> Told[LogEvent]:
            began.set()
            assert go_on.wait(60)
            return Told(())

        worker.logs = slow
        async with grpc.aio.insecure_channel(worker.record.address) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            calls = [stub.ReadLogs(wire.ReadLogsRequest()) for _ in range(MOST_QUERIES)]
            try:
                await asyncio.to_thread(began.wait, 60)
                with pytest.raises(grpc.aio.AioRpcError, match="more are not taken") as refused:
                    # Those before may not all have come.
                    for _ in range(MOST_QUERIES):
                        await stub.ReadLogs(wire.ReadLogsRequest(), timeout=1)
                assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                (missing,) = (await told(cluster)).missing
                assert missing.startswith("the logs of h1 cannot be read: ") and "more are not taken" in missing
            finally:
                go_on.set()
            await asyncio.gather(*calls)


@pytest.mark.parametrize(
    ("own", "siblings"),
    [
        ("router-serve.log", set[str]()),
        ("router-route-7.log", set[str]()),
        ("router-route-7-1.log", {"router-route-7.log", "router-route-7-0.log", "router-route-7-12.log.1"}),
    ],
)
def test_a_router_reads_beside_its_own_file_those_of_its_port_of_gateways_and_the_ones_before(
    own: str, siblings: set[str], tmp_path: Path
) -> None:
    read = {own, f"{own}.1", "gateway-0.log", "gateway-0.log.1", "gateway-12.log"} | siblings
    others = {"router-serve.log", "router-route-7.log", "router-route-7-0.log", "router-route-8-0.log"} - read
    for name in (*read, *others, "gateway-0.log.1.gz", "gateway-0.err", "service.json"):
        (tmp_path / name).touch()
    assert sorted(file.name for file in beside(tmp_path / own)) == sorted(read)


def test_a_line_of_the_log_is_an_object_of_json(tmp_path: Path) -> None:
    with logged("svc-test", "router", LogRules("INFO", "json"), tmp_path / "router.log"):
        logging.getLogger("control_plane.a_part").info("one")
    lines = [json.loads(line) for line in (tmp_path / "router.log").read_text().splitlines()]
    assert [line["message"] for line in lines][1:] == ["one"]
    assert no_logs(LogQuery()) == Told(())


async def test_a_disk_of_the_routers_own_that_does_not_answer_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Three seconds are of no interest here.
    monkeypatch.setattr(service_logs, "ANSWER_TIMEOUT_S", 0.05)
    goes_on = threading.Event()

    def hangs(query: LogQuery) -> Told[LogEvent]:
        assert goes_on.wait(60)
        return Told(())

    nobody: Any = None
    logs = ServiceLogs(Membership(), nobody, hangs)
    try:
        answer = await logs.read(admin.GetLogsRequest())
    finally:
        goes_on.set()
    assert answer.missing == ["the logs of this router and its gateways cannot be read: not within 0.05 s"]
