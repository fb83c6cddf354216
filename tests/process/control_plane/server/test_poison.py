"""A request that ends every engine it gets to ends two of them, and neither it nor its retries a third one."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from rachis.conventions import RETRY_AFTER

from cluster_core.engine_jobs import EngineJob, EngineOutput
from control_plane.model.lifecycle import State
from tests.fakes.answers import failure, text_of, whole_text
from tests.fakes.cluster import DECODE, PREFILL, Cluster, Worker, running_cluster, until

POISON = "poison"


def dies_of(worker: Worker, text: str = POISON) -> None:
    """Its engine ends with the first step that has this prompt in it."""
    generate = worker.engine.generate

    async def deadly(job: EngineJob) -> AsyncIterator[EngineOutput]:
        if bytes(job.token_ids).startswith(text.encode()):
            worker.engine.die("poison")
        async for output in generate(job):
            yield output

    # The stand-in's engine dies of nothing that it is given.
    worker.engine.generate = deadly  # type: ignore[method-assign]


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with running_cluster(router__queue_timeout_s=60) as cluster:
        for pool in (PREFILL, DECODE):
            for _ in range(4):
                dies_of(await cluster.add(pool))
        yield cluster


def dead(cluster: Cluster) -> int:
    return sum(worker.engine.is_dead for worker in cluster.workers)


async def test_poison_ends_two_engines_and_is_refused_then(cluster: Cluster) -> None:
    error = await failure(cluster.call(POISON))
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "2 engines died" in str(error.details())
    trailing: Any = error.trailing_metadata()
    assert RETRY_AFTER not in dict(trailing)
    assert dead(cluster) == 2

    for _ in range(3):
        again = await failure(cluster.call(POISON))
        assert again.code() is grpc.StatusCode.INTERNAL
    assert dead(cluster) == 2
    await until(lambda: sum(cluster.outcomes.values()) == 4)
    await cluster.ends_with({State.FAILED: 4})


async def test_others_go_on_beside_it(cluster: Cluster) -> None:
    await failure(cluster.call(POISON))
    assert text_of(await cluster.generate()) == whole_text()


async def test_the_second_try_of_each_that_was_there_goes_where_nothing_else_runs() -> None:
    """Of equals the first is chosen, so that both would go to the same worker."""
    async with running_cluster(placement__policy="prefix_only") as cluster:
        workers = [await cluster.add(PREFILL) for _ in range(3)]
        await cluster.add(DECODE)
        for worker in workers:
            worker.engine.hold_before(0)
        calls = [cluster.call("one"), cluster.call("another")]
        await until(lambda: len(workers[0].engine.jobs) == 2)

        workers[0].engine.die("of something that was the fault of neither")

        await until(lambda: [len(worker.engine.jobs) for worker in workers] == [2, 1, 1])
        for worker in workers[1:]:
            worker.engine.resume()
        for call in calls:
            assert text_of([response async for response in call])


async def test_one_death_under_several_that_ask_for_the_same_makes_none_of_them_poison() -> None:
    async with running_cluster(handoff__deadline_s=0.5) as cluster:
        prefill = await cluster.add(PREFILL)
        first = await cluster.add(DECODE)
        first.engine.hold_before(3)
        calls = [cluster.call() for _ in range(3)]
        # What has pulled has said so as well: where it dies before, the lease ends by itself, here in hours.
        await until(lambda: len(first.engine.jobs) == 3 and not prefill.engine.status().load.leased_handoffs)
        second = await cluster.add(DECODE)

        first.engine.die("of something that was the fault of none")
        # Each has heard why: of a worker that is gone without a word nobody knows whether it still pulls.
        await until(lambda: len(second.engine.jobs) == 3)
        await first.crash()

        for call in [*calls, cluster.call()]:
            assert text_of([response async for response in call]) == whole_text()


async def test_an_answer_absolves() -> None:
    async with running_cluster() as cluster:
        workers = [await cluster.add(PREFILL) for _ in range(3)]
        await cluster.add(DECODE)
        for worker in workers[:2]:
            worker.engine.hold_before(0)
            call = cluster.call()
            await worker.engine.held.wait()
            worker.engine.die("of a test")
            assert text_of([response async for response in call]) == whole_text()
        assert text_of(await cluster.generate()) == whole_text()
        assert len(cluster.parts.dispatcher.poison) == 0
