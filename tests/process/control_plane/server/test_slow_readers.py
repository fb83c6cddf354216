"""A client that takes nothing of its answer loses its request; whoever waits behind it does not."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
from rachis.conventions import next_message
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import router_pb2 as api
from rachis.v1 import router_pb2_grpc

from control_plane.model.lifecycle import State
from tests.fakes import cluster as clusters
from tests.fakes.answers import text_of, whole_text
from tests.fakes.cluster import DECODE, PREFILL, Cluster, running_cluster, until
from tests.fakes.session_call import SessionCall

# A client that lets the router send it next to nothing that it has not read.
NARROW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1)]
LONG: dict[str, Any] = {"max_model_len": 20_000, "blocks": 1 << 14}
SAMPLING: dict[str, Any] = {"temperature": 0.0, "max_tokens": 4000, "logprobs": 20}
# A client that does not read has withdrawn; one whose own time ends first is late.
OUTCOMES = {"router__send_timeout_s": State.CANCELLED, "router__request_timeout_s": State.EXPIRED}


@pytest.fixture(autouse=True)
def long_answers() -> Iterator[None]:
    """The model that workers of tests register with has room for a few hundred tokens."""
    before = clusters.MODEL.max_model_len
    clusters.MODEL.max_model_len = LONG["max_model_len"]
    yield
    clusters.MODEL.max_model_len = before


@pytest.fixture(params=list(OUTCOMES))
async def narrow(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Cluster, Any, State]]:
    """A cluster with one slot, a client of it that sees next to nothing unless it reads, and how it ends."""
    options: dict[str, Any] = {"router__max_in_flight_requests": 1, "router__queue_timeout_s": 60, request.param: 2}
    async with running_cluster(**options) as cluster:
        for pool in (PREFILL, DECODE):
            await cluster.add(pool, **LONG)
        channel = grpc.aio.insecure_channel(cluster.router.address, options=NARROW)
        cluster.calls += 1
        yield cluster, router_pb2_grpc.RouterServiceStub(channel), OUTCOMES[request.param]
        await channel.close(None)


async def goes_on_without_it(cluster: Cluster, outcome: State) -> None:
    """The next request is served, and nothing is left of the one that nobody reads."""
    await until(lambda: cluster.parts.admission.in_flight == 0)
    assert text_of(await cluster.generate()) == whole_text()
    await until(lambda: cluster.outcomes == {outcome: 1, State.FINISHED: 1})
    await until(lambda: all(not each.in_flight_requests for each in cluster.router.membership.members()))
    counted = cluster.router.metrics.registry.get_sample_value("rachis_slow_readers_total")
    assert counted == float(outcome is State.CANCELLED)


async def ends_with_its_status(call: Any) -> None:
    """What it has not taken waits for it, and the end of that is no whole answer."""
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        while await next_message(call) is not None:
            pass
    assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_client_that_does_not_read_gives_its_place_to_the_next(narrow: tuple[Cluster, Any, State]) -> None:
    cluster, stub, outcome = narrow
    prompt = generation.PromptInput(text="hello")
    call = stub.Generate(api.GenerateRequest(prompt=prompt, sampling=generation.SamplingParams(**SAMPLING)))
    first: Any = await call.read()
    assert first.delta.token_ids
    await goes_on_without_it(cluster, outcome)
    await ends_with_its_status(call)


async def test_so_does_a_session_whose_answer_nobody_reads(narrow: tuple[Cluster, Any, State]) -> None:
    cluster, stub, outcome = narrow
    session = SessionCall(stub.StreamGenerate())
    await session.open("hello", **SAMPLING)
    await session.finish()
    assert (await session.event("first_token")).first_token.delta.token_ids
    await goes_on_without_it(cluster, outcome)
    await ends_with_its_status(session.call)


async def test_so_does_one_that_takes_not_even_the_first_message(narrow: tuple[Cluster, Any, State]) -> None:
    """Which is larger than what may be under way."""
    cluster, stub, outcome = narrow
    sampling = generation.SamplingParams(temperature=0.0, max_tokens=6, prompt_logprobs=20)
    prompt = generation.PromptInput(text="hello" * 150)
    call = stub.Generate(api.GenerateRequest(prompt=prompt, sampling=sampling))
    await until(lambda: cluster.parts.admission.in_flight == 1)
    await goes_on_without_it(cluster, outcome)
    await ends_with_its_status(call)
