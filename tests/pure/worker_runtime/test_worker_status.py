"""What a worker tells of its load, tiers and batch when it is asked for its status."""

import asyncio
from collections.abc import Sequence

from rachis.v1 import worker_pb2 as wire

from cluster_core.engine_jobs import EngineJob, SamplingSpec
from cluster_core.engine_reports import DecodeBatch, HotPrefix, PrefixGroup
from prefill_worker.service import PrefillService
from tests import simulated_time
from tests.fakes.engine import FakeEngine
from tests.pure.worker_runtime.worker_calls import PROMPT, context, prefill_request, registration


async def test_status_tells_load_and_counters() -> None:
    engine = FakeEngine()
    service = PrefillService(engine, registration(), lambda: None)
    await service.Prefill(prefill_request(), context())

    status = await service.GetWorkerStatus(wire.GetWorkerStatusRequest(), context())

    assert (status.load.leased_handoffs, status.counters.handoffs_leased, status.counters.requests) == (1, 1, 1)
    assert status.counters.prompt_tokens == len(PROMPT)
    assert status.counters.resident_bytes > 0
    assert status.counters.node_memory_bytes > status.counters.node_available_bytes > 0
    assert status.registration.worker_id == "w-0"


async def status_of(
    engine: FakeEngine, hottest_prefixes: int = 0, batch_entries: int = 0
) -> wire.GetWorkerStatusResponse:
    service = PrefillService(engine, registration(), lambda: None)
    request = wire.GetWorkerStatusRequest(hottest_prefixes=hottest_prefixes, batch_entries=batch_entries)
    return await service.GetWorkerStatus(request, context())


async def test_status_tells_what_the_tiers_saved_and_the_hottest_prefixes_only_when_asked() -> None:
    engine = FakeEngine()
    for name in ("r#1", "r#2"):
        async for _ in engine.generate(EngineJob(name, tuple(range(9)), SamplingSpec(max_tokens=1))):
            pass

    status = await status_of(engine)
    asked = await status_of(engine, 5)

    assert (status.tiers.prompt_tokens, status.tiers.device_hit_tokens, status.tiers.device_blocks) == (18, 8, 2)
    assert not status.HasField("hottest")
    assert asked.tiers == status.tiers
    [prefix] = asked.hottest.prefixes
    assert (prefix.tokens, prefix.device_blocks, prefix.host_blocks, prefix.frequency) == (8, 2, 0, 2)


async def test_a_worker_without_tiers_tells_nothing_of_them() -> None:
    status = await status_of(FakeEngine(has_tiers=False), 5)

    assert (status.HasField("tiers"), status.HasField("hottest")) == (False, False)


async def test_more_of_the_hottest_prefixes_than_the_limit_are_not_told() -> None:
    engine = FakeEngine()
    for number in range(120):
        async for _ in engine.generate(EngineJob(f"r#{number}", (number,) * 5, SamplingSpec(max_tokens=1))):
            pass

    assert len((await status_of(engine, 7)).hottest.prefixes) == 7
    assert len((await status_of(engine, 2**32 - 1)).hottest.prefixes) == 100


def test_an_engine_in_a_long_step_is_not_waited_for() -> None:
    class Busy(FakeEngine):
        async def hottest_prefixes(self, at_most: int) -> Sequence[HotPrefix]:
            return await asyncio.Future()

        async def decode_batch(self, at_most: int) -> DecodeBatch:
            return await asyncio.Future()

    status = simulated_time.run(status_of(Busy(forms_batches=True), 5, 5))

    assert (status.HasField("tiers"), status.HasField("hottest")) == (True, False)
    assert (status.HasField("decode"), status.HasField("batch")) == (True, False)


async def test_status_tells_how_the_batch_is_formed_and_the_batch_only_when_asked() -> None:
    engine = FakeEngine(forms_batches=True)
    engine.hold_before(1)
    running = [engine.generate(EngineJob(f"r#{number}", (*range(8), number), SamplingSpec())) for number in range(3)]
    for outputs in running:
        await anext(outputs)

    status = await status_of(engine)
    asked = await status_of(engine, batch_entries=1)

    assert (status.decode.running_requests, status.decode.tip_tokens) == (3, 8)
    assert dict(status.decode.admissions) == {"idle": 1, "policy": 2}
    assert not status.HasField("batch")
    assert asked.decode == status.decode
    assert [(group.tokens, group.running) for group in asked.batch.groups] == [(8, 3)]
    for outputs in running:
        await outputs.aclose()  # type: ignore[attr-defined]


async def test_a_worker_without_a_decode_report_tells_nothing_of_a_batch() -> None:
    status = await status_of(FakeEngine(), batch_entries=5)

    assert (status.HasField("decode"), status.HasField("batch")) == (False, False)


async def test_more_of_a_batch_than_the_limit_is_not_told() -> None:
    class Many(FakeEngine):
        async def decode_batch(self, at_most: int) -> DecodeBatch:
            return DecodeBatch(groups=(PrefixGroup("", 0, 1, 0),) * at_most)

    engine = Many(forms_batches=True)

    assert len((await status_of(engine, batch_entries=7)).batch.groups) == 7
    assert len((await status_of(engine, batch_entries=2**32 - 1)).batch.groups) == 100


async def test_a_call_that_the_engine_has_not_heard_of_yet_keeps_its_worker_busy() -> None:
    record = registration()
    service = PrefillService(FakeEngine(), record, lambda: None)
    assert service.is_idle()
    # The moment between a call's arrival and its engine is too short for a test to ask in.
    with service._taken(wire.PrefillRequest(generation=record.generation)):
        assert not service.is_idle()
        status = await service.GetWorkerStatus(wire.GetWorkerStatusRequest(), context())
        assert status.load.active_calls == 1
    assert service.is_idle()
