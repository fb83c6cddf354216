"""Figures of latency that lead to traces: in the format that has room for them, of requests whose trace is kept."""

import asyncio
import re
import urllib.request

from rachis.v1 import admin_pb2 as admin
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import router_pb2 as api

from tests.fakes.cluster import DECODE, PREFILL, Cluster, running_cluster

OPEN_METRICS = "application/openmetrics-text;version=1.0.0"
TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-{flags}"
_EXEMPLAR = re.compile(r'^(rachis_\w+)_bucket\{.*\} \S+ # \{trace_id="(\w{32})"\} (\S+) ', re.MULTILINE)


async def page(cluster: Cluster, accept: str) -> str:
    def read() -> str:
        asked = urllib.request.Request(
            f"http://{cluster.router.metrics.address}/metrics", headers={"Accept": accept} if accept else {}
        )
        with urllib.request.urlopen(asked, timeout=60) as response:
            text: str = response.read().decode()
            return text

    return await asyncio.to_thread(read)


async def asked(cluster: Cluster, flags: str) -> None:
    """A request whose caller wants its trace sampled, with flags 01."""
    cluster.calls += 1
    request = api.GenerateRequest(
        prompt=generation.PromptInput(text="hello"), sampling=generation.SamplingParams(max_tokens=4)
    )
    async for _ in cluster.api.Generate(request, metadata=(("traceparent", TRACEPARENT.format(flags=flags)),)):
        pass


async def test_a_sampled_request_is_an_exemplar_of_its_time_to_first_token(cluster: Cluster) -> None:
    await asked(cluster, "01")
    ((name, trace_id, ttft_s),) = _EXEMPLAR.findall(await page(cluster, OPEN_METRICS))
    assert (name, trace_id) == ("rachis_request_ttft_seconds", TRACEPARENT.split("-")[1])
    assert float(ttft_s) > 0
    assert (await cluster.admin.GetTrace(admin.GetTraceRequest(request_id=trace_id))).trace_id == trace_id


async def test_a_request_whose_trace_nobody_keeps_is_none(cluster: Cluster) -> None:
    await asked(cluster, "00")
    assert "trace_id" not in await page(cluster, OPEN_METRICS)


async def test_the_plain_format_has_no_exemplars(cluster: Cluster) -> None:
    await asked(cluster, "01")
    text = await page(cluster, "")
    assert "rachis_request_ttft_seconds_bucket" in text
    assert "trace_id" not in text


async def test_a_request_and_a_session_that_miss_the_objective_are_exemplars() -> None:
    async with running_cluster(objectives__ttft_s=1e-9) as cluster:
        await cluster.add(PREFILL)
        await cluster.add(DECODE)
        await asked(cluster, "00")
        session = cluster.session()
        await session.open()
        await session.finish()
        await session.answer()
        found = _EXEMPLAR.findall(await page(cluster, OPEN_METRICS))
        names = {name for name, _, _ in found}
        assert names == {"rachis_request_ttft_seconds", "rachis_session_ttft_seconds"}
        for _, trace_id, _ in found:
            assert (await cluster.admin.GetTrace(admin.GetTraceRequest(request_id=trace_id))).trace_id == trace_id
