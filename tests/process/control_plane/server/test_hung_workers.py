"""A worker that hangs holds up few requests, none for long; one that was suspected comes back without the registry."""

import asyncio

import grpc
import pytest
from rachis.v1 import worker_pb2 as wire

from control_plane.fleet.vitality import VitalityTiming
from control_plane.model.lifecycle import State
from control_plane.server.composition import RouterTiming
from tests.fakes.answers import failure, session_text, text_of, whole_text
from tests.fakes.cluster import DECODE, PREFILL, Cluster, Worker, named, running_cluster, until

SHARED = "s" * 300
REQUESTS = 60
# Between two of them, as they come whatever becomes of those before.
EVERY_S = 0.05
# Long enough for a busy machine; a request that waits for the engine that hangs never ends.
PATIENT_S = 60.0


def most_used(cluster: Cluster, pool: wire.Pool.ValueType) -> Worker:
    return max(
        (worker for worker in cluster.workers if worker.record.pool == pool), key=lambda worker: len(worker.engine.jobs)
    )


@pytest.mark.parametrize("disaggregation", ["always", "conditional"])
@pytest.mark.parametrize("pool", [PREFILL, DECODE], ids=["prefill", "decode"])
async def test_a_hung_engine_does_not_keep_those_who_share_its_prefix(
    pool: wire.Pool.ValueType, disaggregation: str
) -> None:
    async with running_cluster(placement__disaggregation=disaggregation) as cluster:
        for kind in (PREFILL, PREFILL, DECODE, DECODE):
            await cluster.add(kind)
        for number in range(6):
            await cluster.generate(f"{SHARED}{number}")
        hung = most_used(cluster, pool)
        hung.engine.hold_before(0)

        calls = []
        for number in range(REQUESTS):
            calls.append(asyncio.create_task(cluster.generate(f"{SHARED}{100 + number}", timeout_s=PATIENT_S)))
            await asyncio.sleep(EVERY_S)
        answers = await asyncio.gather(*calls)

        expected = [session_text(f"{SHARED}{100 + number}") for number in range(REQUESTS)]
        assert [text_of(answer) for answer in answers] == expected
        hung.engine.resume()


async def test_the_only_decode_worker_is_waited_for_while_it_hangs(cluster: Cluster) -> None:
    decoder = named(cluster, "decode-0")
    decoder.engine.hold_before(0)
    call = asyncio.create_task(cluster.generate(timeout_s=PATIENT_S))
    await until(lambda: bool(cluster.router.membership.suspects()))
    await asyncio.sleep(0.5)
    assert not call.done()

    decoder.engine.resume()

    assert text_of(await call) == whole_text()


async def test_a_suspect_worker_serves_again_while_the_registry_is_away() -> None:
    async with running_cluster(router__queue_timeout_s=PATIENT_S) as cluster:
        for kind in (PREFILL, DECODE):
            await cluster.add(kind)
        await cluster.generate()
        cluster.registry.store.is_down = True
        await until(lambda: not cluster.parts.follower.connected)
        (decoder,) = cluster.router.membership.usable(DECODE)
        cluster.router.membership.suspect(decoder)

        assert text_of(await cluster.generate()) == whole_text()

        assert not cluster.router.membership.suspects()


async def test_a_worker_that_is_gone_stays_suspect_and_is_asked_ever_less(cluster: Cluster) -> None:
    decoder = named(cluster, "decode-0")
    await decoder.crash()
    asked = 0
    # On a busy machine one may have been given up before it was decoded.
    while not cluster.router.membership.suspects() and asked < 5:
        asked += 1
        error = await failure(cluster.call(timeout_s=2.0))
        assert error.code() in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}
    assert [each.worker_id for each in cluster.router.membership.suspects()] == [decoder.name]
    await until(lambda: sum(cluster.outcomes.values()) == asked)
    assert State.FINISHED not in cluster.outcomes


async def test_a_worker_is_doubtful_for_who_waits_for_it_and_not_for_a_session_that_waits_for_its_client() -> None:
    async with running_cluster(timing=RouterTiming(vitality=VitalityTiming(doubtful_s=0.05))) as cluster:
        for pool in (PREFILL, DECODE):
            await cluster.add(pool)
        doubtful = cluster.parts.probes.doubtful
        session = cluster.session()
        await session.open()
        await asyncio.sleep(0.2)
        assert doubtful() == frozenset()

        engine = named(cluster, "prefill-0").engine
        engine.hold_before(0)
        call = cluster.call()
        await until(lambda: doubtful() == {("prefill-0", 1)})
        engine.resume()
        assert text_of([response async for response in call]) == whole_text()
        assert doubtful() == frozenset()
        session.call.cancel()
