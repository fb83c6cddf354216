"""Who gets the router's only slot: of what waits, requests and sessions, the lowest priority number."""

import asyncio

from tests.fakes.cluster import DECODE, PREFILL, named, running_cluster, until


async def test_what_waits_for_a_slot_gets_it_by_priority_and_not_by_arrival() -> None:
    async with running_cluster(router__max_in_flight_requests=1) as cluster:
        for pool in (PREFILL, DECODE):
            await cluster.add(pool)
        engine = named(cluster, "decode-0").engine
        engine.hold_before(4)
        first = asyncio.create_task(cluster.generate(request_id="first"))
        await engine.held.wait()
        admission, waiting = cluster.parts.admission, []
        for queued, priority in enumerate((2, 0), 1):
            waiting.append(asyncio.create_task(cluster.generate("x" * 40, priority=priority)))
            await until(lambda queued=queued: admission.queued == queued)  # type: ignore[misc]
        session = cluster.session()
        # Of no prefix that the worker may still have from the first.
        opening = asyncio.create_task(session.open("world", priority=1))
        await until(lambda: admission.queued == 3)
        prefill = named(cluster, "prefill-0").engine
        # The session keeps its slot until it has computed something.
        prefill.compute_at_most(0)
        engine.resume()
        await opening
        await until(lambda: bool(prefill.sessions) or len(prefill.jobs) > 2)
        assert [job.priority for job in prefill.jobs] == [0, 0] and len(prefill.sessions) == 1
        prefill.resume()
        await session.finish()
        await asyncio.gather(first, *waiting, session.answer())
        assert sorted(job.priority for job in prefill.jobs) == [0, 0, 1, 2]
