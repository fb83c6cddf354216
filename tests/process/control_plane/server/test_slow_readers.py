"""A client that takes nothing of its answer loses its request; whoever waits behind it does not."""

from typing import Any

import grpc
import pytest
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import router_pb2 as api
from rachis.v1 import router_pb2_grpc
from rachis.wire import next_message

from control_plane.model.lifecycle import State
from tests.fakes import cluster as clusters
from tests.fakes.answers import text_of, whole_text
from tests.fakes.cluster import DECODE, PREFILL, Cluster, running_cluster, until

# A client that lets the router send it next to nothing that it has not read.
NARROW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1)]
LONG: dict[str, Any] = {"max_model_len": 20_000, "blocks": 1 << 14}


async def add_workers(cluster: Cluster) -> None:
    for pool in (PREFILL, DECODE):
        await cluster.add(pool, **LONG)


def request() -> api.GenerateRequest:
    sampling = generation.SamplingParams(temperature=0.0, max_tokens=4000, logprobs=20)
    return api.GenerateRequest(prompt=generation.PromptInput(text="hello"), sampling=sampling)


@pytest.mark.parametrize("limit", ["router__send_timeout_s", "router__request_timeout_s"])
async def test_a_client_that_does_not_read_gives_its_place_to_the_next(limit: str) -> None:
    before = clusters.MODEL.max_model_len
    clusters.MODEL.max_model_len = LONG["max_model_len"]
    try:
        options: dict[str, Any] = {"router__max_in_flight_requests": 1, "router__queue_timeout_s": 60, limit: 2}
        async with running_cluster(**options) as cluster:
            await add_workers(cluster)
            channel = grpc.aio.insecure_channel(cluster.router.address, options=NARROW)
            call = router_pb2_grpc.RouterServiceStub(channel).Generate(request())
            cluster.calls += 1
            first: Any = await call.read()
            assert first.delta.token_ids

            await until(lambda: cluster.parts.admission.in_flight == 0)
            assert text_of(await cluster.generate()) == whole_text()

            await until(lambda: cluster.outcomes == {State.EXPIRED: 1, State.FINISHED: 1})
            await until(lambda: all(not each.in_flight_requests for each in cluster.router.membership.members()))
            # What it has not taken waits for it, and the end of that is no whole answer.
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                while await next_message(call) is not None:
                    pass
            assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            await channel.close(None)
    finally:
        clusters.MODEL.max_model_len = before
