"""Workers that leave their pools once they are idle, or when their time is over, in a cluster of fake engines."""

import asyncio
from typing import Any

import grpc
import pytest
from rachis import conventions
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire
from rachis.v1 import worker_pb2_grpc

from cluster_core.errors import DeadlineError
from tests.fakes.answers import failure, text_of, whole_text
from tests.fakes.cluster import DECODE, named, until
from tests.process.control_plane.pools.pool_world import busy_worker, followed, pools_of, quiet, removed, sizes

# Tokens: more than a worker sends to a router that says nothing.
_LONG = 300


async def test_a_drained_worker_leaves_only_after_what_it_runs_has_ended() -> None:
    async with pools_of() as (cluster, pools, actors):
        await pools.start(quiet)
        busy, running = await busy_worker(cluster)
        leaving = asyncio.create_task(removed(cluster, "decode-0"))
        await until(lambda: any("1 requests run" in each.detail for each in pools.status()[1].workers))
        assert actors.stops == []
        assert text_of(await cluster.generate()), "the other one serves"

        busy.engine.resume()
        assert text_of(await running) == text_of(await cluster.generate(max_tokens=8))
        await leaving
        assert actors.stops == ["decode-0"]
        assert sizes(pools) == [(1, 1), (1, 1)]
        assert [status.lost_workers for status in pools.status()] == [0, 0]


async def test_a_worker_whose_registration_has_ended_leaves_only_after_what_it_runs_has_ended() -> None:
    """Its host is cut off from Redis: Ray has its process, and routers read its answers."""
    async with pools_of() as (cluster, pools, actors):
        await pools.start(quiet)
        busy, running = await busy_worker(cluster)
        await cluster.unregister(busy)
        await until(lambda: sizes(pools)[1] == (2, 1))
        pools.resize(DECODE, 1)
        await until(lambda: any("1 requests run" in each.detail for each in pools.status()[1].workers))
        assert actors.stops == []

        busy.engine.resume()
        assert text_of(await running)
        await until(lambda: len(pools.status()[1].workers) == 1)
        assert actors.stops == ["decode-0"]


async def test_a_drained_worker_leaves_only_after_its_routers_have_taken_what_it_has_said() -> None:
    """Another router than the controller's, which is behind: its call is over, and most of its rows are not read."""
    async with pools_of() as (cluster, pools, actors):
        await pools.start(quiet)
        record = named(cluster, "decode-0").record
        async with grpc.aio.insecure_channel(record.address) as channel:
            worker = worker_pb2_grpc.WorkerServiceStub(channel)
            rows: Any = worker.StreamOutputs()  # type: ignore[call-arg]  # it is written to
            await rows.write(wire.StreamOutputsRequest(generation=record.generation, stream_id="behind"))
            await rows.read()
            answer = worker.Decode(_decode(record.generation, output_stream="behind"))
            assert await conventions.next_message(answer) is None

            leaving = asyncio.create_task(removed(cluster, "decode-0"))
            await until(lambda: any("1 requests run" in each.detail for each in pools.status()[1].workers))
            assert actors.stops == []
            assert await _taken(rows) == _LONG
        await leaving
        assert actors.stops == ["decode-0"]


def _decode(generation_number: int, output_stream: str) -> wire.DecodeRequest:
    return wire.DecodeRequest(
        request_id="for-another-router",
        generation=generation_number,
        token_ids=[65] * 5,
        sampling=generation.SamplingParams(temperature=0.0, max_tokens=_LONG, ignore_eos=True),
        output_stream=output_stream,
        output_call=1,
    )


async def _taken(rows: Any) -> int:
    """Tokens that a router reads until the stream ends."""
    tokens = 0
    while (message := await conventions.next_message(rows)) is not None:
        responses = [event.response for event in message.events]
        pieces = [response.end.delta if response.HasField("end") else response.delta for response in responses]
        tokens += sum(message.token_counts) + sum(len(piece.token_ids) for piece in pieces)
        if message.acknowledge:
            await rows.write(wire.StreamOutputsRequest())
    return tokens


async def test_a_worker_leaves_at_once_whose_answers_go_on_elsewhere() -> None:
    async with pools_of() as (cluster, pools, actors):
        await pools.start(quiet)
        busy = named(cluster, "decode-0")
        busy.engine.hold_before(4)
        running = asyncio.create_task(cluster.generate(max_tokens=8))
        await busy.engine.held.wait()

        await removed(cluster, "decode-0")

        assert actors.stops == ["decode-0"]
        assert text_of(await running) == whole_text()


async def test_a_worker_that_is_too_busy_to_answer_is_not_taken_for_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pools_of() as (cluster, pools, actors):
        await pools.start(quiet)
        busy, running = await busy_worker(cluster)
        asked, ask = 0, cluster.parts.client.status

        async def late(*args: Any) -> wire.GetWorkerStatusResponse:
            nonlocal asked
            asked += 1
            if asked < 4:
                raise DeadlineError("worker decode-0: Deadline Exceeded")
            return await ask(*args)

        # A worker that is really late takes two seconds each time.
        monkeypatch.setattr(cluster.parts.client, "status", late)
        leaving = asyncio.create_task(removed(cluster, "decode-0"))
        await until(lambda: asked > 5)
        assert actors.stops == []
        busy.engine.resume()
        assert text_of(await running)
        await leaving
        assert actors.stops == ["decode-0"]


async def test_a_worker_that_does_not_become_idle_leaves_when_its_time_is_over() -> None:
    async with pools_of(limits__drain_timeout_s=0.1) as (cluster, pools, actors):
        await pools.start(quiet)
        _, running = await busy_worker(cluster)
        await followed(cluster.admin.RemoveWorker(admin.RemoveWorkerRequest(worker_id="decode-0")))
        assert actors.stops == ["decode-0"]
        with pytest.raises(grpc.aio.AioRpcError):
            await running


async def test_the_last_decode_worker_leaves_by_force_alone() -> None:
    async with pools_of(decode=1) as (cluster, pools, _):
        await pools.start(quiet)
        request = admin.RemoveWorkerRequest(worker_id="decode-0")
        refused = await failure(cluster.admin.RemoveWorker(request))
        assert refused.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "no decode worker is ready" in (refused.details() or "")
        request.force = True
        await followed(cluster.admin.RemoveWorker(request))
        assert sizes(pools) == [(1, 1), (0, 0)]


async def test_a_worker_that_is_taken_back_while_it_leaves_is_told_again() -> None:
    async with pools_of() as (cluster, pools, actors):
        await pools.start(quiet)
        busy, running = await busy_worker(cluster)
        leaving = asyncio.create_task(removed(cluster, "decode-0"))
        await until(lambda: busy.record.state == wire.WORKER_STATE_DRAINING)
        await cluster.admin.ResumeWorker(admin.ResumeWorkerRequest(worker_id="decode-0"))
        await until(lambda: busy.record.state == wire.WORKER_STATE_DRAINING)
        busy.engine.resume()
        assert text_of(await running)
        await leaving
        assert actors.stops == ["decode-0"]
