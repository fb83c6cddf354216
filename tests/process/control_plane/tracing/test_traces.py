"""Traces of a cluster: the stages of each kind of request, and a collector that takes them, or hangs."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_grpc
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import router_pb2 as api

from benchmarks.otlp_collector import listening
from tests.fakes.answers import text_of, whole_text
from tests.fakes.cluster import DECODE, PREFILL, Cluster, named, running_cluster, until
from tests.fakes.session_call import session_open
from tests.stages import adds_up


@asynccontextmanager
async def traced(**flags: Any) -> AsyncIterator[Cluster]:
    async with running_cluster(**flags) as cluster:
        for pool in (PREFILL, DECODE):
            await cluster.add(pool)
        yield cluster


async def trace_of(cluster: Cluster, name: str = "") -> admin.GetTraceResponse:
    response: admin.GetTraceResponse = await cluster.admin.GetTrace(admin.GetTraceRequest(request_id=name))
    return response


async def test_a_request_through_both_pools_says_where_its_time_went() -> None:
    async with traced() as cluster:
        await cluster.generate(request_id="mine")
        told = await trace_of(cluster, "mine")
        names = [stage.name for stage in told.answer.stages]
        assert (told.request_id, told.kind, told.outcome) == ("mine", "request", "finished")
        assert names[0] == "intake" and {"tokenization", "placement", "decode"} <= set(names)
        workers = {stage.name: stage.worker_id for stage in told.answer.stages}
        assert workers["decode"] == "decode-0" and "prefill-0" in workers.values()
        assert told.answer.completion_tokens == 8 and told.answer.HasField("ttft_ms")
        assert [decision.worker_id for decision in told.decisions] == ["prefill-0", "decode-0"]
        adds_up(told.answer)


async def test_a_session_waits_for_input_and_then_its_client_for_it() -> None:
    async with traced() as cluster:
        session = cluster.session()
        await session.open("hello")
        await session.finish(" world")
        await session.answer()
        await until(cluster.idle)
        told = await trace_of(cluster)
        assert told.kind == "session" and "input" in [stage.name for stage in told.answer.stages]
        assert any(event.name == "session_tokens" for event in told.answer.events)
        assert told.answer.ttft_ms <= told.answer.end_to_end_ms
        adds_up(told.answer)


async def test_requests_are_listed_in_a_line_each_while_they_run_and_after() -> None:
    async with traced() as cluster:
        await cluster.generate(request_id="over")
        engine = named(cluster, "decode-0").engine
        engine.hold_before(4)
        answers = [asyncio.create_task(cluster.generate(request_id=name)) for name in ("first", "second")]
        await engine.held.wait()
        await until(lambda: engine.status().load.running_requests == 2)
        listed = admin.ListRequestsRequest(running=1, ended=10)

        async with asyncio.timeout(60):
            # What the engine has begun the router hears of a little later.
            while (told := await cluster.admin.ListRequests(listed)).running[0].stage == "decode_call":  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        (first,), (over,) = told.running, told.ended
        assert (first.request_id, first.kind, first.outcome) == ("first", "request", "")
        assert (first.stage, first.worker_id) == ("decode", "decode-0") and first.HasField("ttft_ms")
        assert 0 < first.stage_ms < first.age_ms and told.running_total == 2
        assert (over.request_id, over.outcome, over.completion_tokens) == ("over", "finished", 8)

        engine.resume()
        await asyncio.gather(*answers)
        told = await cluster.admin.ListRequests(admin.ListRequestsRequest(running=10, ended=2))
        assert not told.running and {view.request_id for view in told.ended} == {"first", "second"}


@pytest.mark.parametrize("name", ["x" * 3_000_000, "\x1b]0;owned\x1b\\\x1b[2J"])
async def test_an_id_that_is_refused_is_in_no_trace(name: str) -> None:
    """It would take memory that nobody counts, be too long to be told, and write on an operator's terminal."""
    async with traced() as cluster:
        with pytest.raises(grpc.aio.AioRpcError, match="printable characters"):
            await cluster.generate(request_id=name)
        session = cluster.session()
        await session.send(open=session_open("hello", "APPEND", request_id=name))
        assert "printable characters" in str((await session.failure()).details())
        await until(cluster.idle)

        told = await cluster.admin.ListRequests(admin.ListRequestsRequest(ended=10))
        assert [view.outcome for view in told.ended] == ["refused", "refused"]
        assert all(view.request_id.startswith("req-") for view in told.ended)


async def test_an_answer_that_goes_on_elsewhere_shows_its_pause() -> None:
    async with traced() as cluster:
        await cluster.add(DECODE)
        engine = named(cluster, "decode-0").engine
        # Of its answer, which the prefill worker begins.
        engine.hold_before(4)
        answer, tokens = aiter(cluster.call(max_tokens=30, request_id="moved")), 0
        while tokens < 2:
            tokens += len((await anext(answer)).delta.token_ids)
        await engine.held.wait()
        engine.die("of a test")
        _ = [response async for response in answer]
        told = await trace_of(cluster, "moved")
        assert {stage.worker_id for stage in told.answer.stages if stage.name == "decode"} == {"decode-0", "decode-1"}
        assert any(stage.migrates for stage in told.answer.stages)
        assert any(event.name == "worker_lost" for event in told.answer.events)
        adds_up(told.answer)


async def test_each_choice_has_a_way_of_its_own() -> None:
    async with traced() as cluster:
        cluster.calls += 1
        request = cluster_request(n=3)
        _ = [response async for response in cluster.api.Generate(request)]
        told = await trace_of(cluster)
        assert len(told.further_choices) == 2
        for answer in (told.answer, *told.further_choices):
            adds_up(answer)


def cluster_request(**fields: Any) -> api.GenerateRequest:
    request = api.GenerateRequest(**fields)
    request.prompt.text = "hello"
    request.sampling.temperature, request.sampling.max_tokens = 0.0, 8
    return request


async def test_a_trace_that_is_not_there_is_not_found_by_name() -> None:
    async with traced() as cluster:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await trace_of(cluster, "nobody")
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND and "nobody" in (raised.value.details() or "")


class Collector(otlp_grpc.TraceServiceServicer):
    """Of OTLP over gRPC; one that hangs answers nobody."""

    def __init__(self, *, hangs: bool = False) -> None:
        self.spans: list[Any] = []
        self.asked = 0
        self._answers = asyncio.Event()
        if not hangs:
            self._answers.set()

    async def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.asked += 1
        await self._answers.wait()
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)
        return otlp.ExportTraceServiceResponse()


async def test_a_collector_gets_a_span_for_the_request_and_one_for_each_stage() -> None:
    collector = Collector()
    async with listening(collector) as url, traced(tracing__otlp_endpoint=url, tracing__sample_rate=0.0) as cluster:
        assert text_of(await cluster.generate()) == whole_text()
        parent = f"00-{0xABC:032x}-{0xDEF:016x}-01"
        cluster.calls += 1
        call = cluster.api.Generate(cluster_request(request_id="told"), metadata=(("traceparent", parent),))
        _ = [response async for response in call]
        await until(lambda: bool(collector.spans))
        told = await trace_of(cluster, "told")
        (root,) = [span for span in collector.spans if span.parent_span_id == (0xDEF).to_bytes(8, "big")]
        assert told.exported and {span.trace_id for span in collector.spans} == {(0xABC).to_bytes(16, "big")}
        children = [span for span in collector.spans if span.parent_span_id == root.span_id]
        assert len(children) == len(told.answer.stages), "the one that nobody wished for is not among them"
        assert all(b"hello" not in span.SerializeToString() for span in collector.spans), "nothing of a prompt"
        exporter = cluster.parts.traces.exporter
        assert exporter is not None
        await until(lambda: exporter.exported == 1)


async def test_a_collector_that_hangs_keeps_nobody_and_what_it_does_not_take_is_counted() -> None:
    collector = Collector(hangs=True)
    flags = {"tracing__sample_rate": 1.0, "tracing__queue_traces": 2, "tracing__timeout_s": 0.3}
    async with listening(collector) as url, traced(tracing__otlp_endpoint=url, **flags) as cluster:
        await cluster.generate()
        await until(lambda: collector.asked > 0)
        for _ in range(5):
            assert text_of(await cluster.generate()) == whole_text()
        exporter = cluster.parts.traces.exporter
        assert exporter is not None and exporter.dropped["queue_full"] >= 1
        await until(lambda: exporter.dropped["not_taken"] >= 1)
        assert exporter.exported == 0
