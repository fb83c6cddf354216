"""Sessions whose workers are lost, are of another generation, or are not there at all.

Every test ends with a check that nothing is left: no blocks, no leases, no in-flight counts, one outcome a session.
"""

import grpc
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire

from control_plane.model.lifecycle import State
from tests.fakes.answers import retry_after_ms, session_text, text_of
from tests.fakes.cluster import DECODE, PREFILL, Cluster, named, running_cluster, until

# Prefill workers.


async def test_a_prefill_worker_that_is_lost_mid_session_is_replaced_with_the_prompt_as_it_stands(
    cluster_2x2: Cluster,
) -> None:
    session = cluster_2x2.session()
    await session.open("hello", "UPDATE")
    await session.update(1, " wide")
    await session.append(" world")
    await session.progressed(lambda progress: progress.ready_tokens >= 15)

    named(cluster_2x2, "prefill-0").engine.die("of a test")
    await until(lambda: bool(named(cluster_2x2, "prefill-1").engine.sessions))
    await session.append(", again")
    await session.finish()

    events = await session.answer()
    assert text_of(events) == session_text("hello wide world, again")
    completion = events[-1].completion
    assert completion.route.prefill_worker_id == "prefill-1"
    assert completion.session.tokens.inputs == 3
    assert completion.session.tokens.received_tokens == 23
    # Both workers' work counts.
    assert completion.session.tokens.computed_tokens == 15 + 23


async def test_a_prefill_worker_whose_process_ends_mid_session_is_replaced(cluster_2x2: Cluster) -> None:
    session = cluster_2x2.session()
    await session.open("hello")
    await session.append(" world")

    await named(cluster_2x2, "prefill-0").crash()
    await session.append("!")
    await session.finish()

    events = await session.answer()
    assert text_of(events) == session_text("hello world!")
    assert events[-1].completion.route.prefill_worker_id == "prefill-1"


async def test_a_prefill_worker_that_is_lost_after_finish_is_replaced(cluster_2x2: Cluster) -> None:
    engine = named(cluster_2x2, "prefill-0").engine
    engine.hold_before(0)
    session = cluster_2x2.session()
    await session.open("hello")
    await session.finish(" world")
    await engine.held.wait()

    engine.die("of a test")

    events = await session.answer()
    assert text_of(events) == session_text("hello world")
    assert events[-1].completion.route.prefill_worker_id == "prefill-1"


async def test_a_session_accepted_at_once_by_the_second_worker_names_that_one(cluster_2x2: Cluster) -> None:
    await named(cluster_2x2, "prefill-0").crash()
    session = cluster_2x2.session()

    accepted = await session.open("hello")

    assert accepted.prefill_worker_id == "prefill-1"
    await session.finish()
    assert text_of(await session.answer()) == session_text("hello")


async def test_when_no_prefill_worker_is_left_input_is_still_taken_and_the_decode_worker_computes_it(
    cluster: Cluster,
) -> None:
    session = cluster.session()
    await session.open("hello")
    await session.append(" wide")
    await session.progressed(lambda progress: progress.inputs == 1)

    named(cluster, "prefill-0").engine.die("of a test")
    await until(lambda: not cluster.router.membership.usable(PREFILL))
    await session.append(" world")
    progress = await session.progressed(lambda progress: progress.inputs == 2)
    assert (progress.prompt_tokens, progress.ready_tokens) == (16, 0)
    await session.finish()

    events = await session.answer()
    assert text_of(events) == session_text("hello wide world")
    completion = events[-1].completion
    assert (completion.route.prefill_worker_id, completion.route.decode_worker_id) == ("", "decode-0")
    assert not completion.HasField("session")


async def test_only_so_many_prefill_workers_are_tried() -> None:
    async with running_cluster(router__prefill_attempts=2) as cluster:
        for _ in range(3):
            # It refuses: it is another start of itself by now.
            stale = wire.WorkerRegistration()
            stale.CopyFrom((await cluster.add(PREFILL)).record)
            stale.generation += 100
            await cluster.register(stale)
        await cluster.add(DECODE)
        session = cluster.session()

        assert (await session.open("hello")).prefill_worker_id == ""

        await session.finish()
        assert text_of(await session.answer()) == session_text("hello")
        assert len(cluster.router.membership.usable(PREFILL)) == 1


async def test_without_a_prefill_worker_a_session_is_accepted_and_computed_at_its_finish(empty: Cluster) -> None:
    await empty.add(DECODE)
    session = empty.session()

    accepted = await session.open("hello", "UPDATE")

    assert accepted.prefill_worker_id == ""
    await session.append(" world")
    progress = await session.progressed(lambda progress: progress.inputs == 1)
    assert (progress.received_tokens, progress.prompt_tokens, progress.computed_tokens) == (11, 11, 0)
    await session.update(1, " wide world")
    await session.finish()
    events = await session.answer()
    assert text_of(events) == session_text("hello wide world")
    assert events[0].first_token.ttft_from_finish_ms > 0


async def test_a_worker_of_another_generation_refuses_and_the_next_one_serves(cluster_2x2: Cluster) -> None:
    stale = wire.WorkerRegistration()
    stale.CopyFrom(named(cluster_2x2, "prefill-0").record)
    stale.generation = 99
    await cluster_2x2.register(stale)
    session = cluster_2x2.session()

    assert (await session.open("hello")).prefill_worker_id == "prefill-1"

    await session.finish()
    assert text_of(await session.answer()) == session_text("hello")
    assert named(cluster_2x2, "prefill-0").engine.sessions == []


# Decode workers.


async def test_a_session_is_prefilled_even_while_no_decode_worker_is_there(empty: Cluster) -> None:
    engine = (await empty.add(PREFILL)).engine
    session = empty.session()
    assert (await session.open("hello")).prefill_worker_id == "prefill-0"
    await session.append(" world")
    await session.progressed(lambda progress: progress.ready_tokens == 10)

    await empty.add(DECODE)
    await session.finish()

    events = await session.answer()
    assert text_of(events) == session_text("hello world")
    assert events[-1].completion.route.handoff == generation.HANDOFF_OUTCOME_PULLED
    assert len(engine.sessions) == 1


async def test_without_a_decode_worker_a_finished_session_ends_after_the_bounded_wait() -> None:
    async with running_cluster(router__queue_timeout_s=0.05) as cluster:
        await cluster.add(PREFILL)
        session = cluster.session()
        await session.open("hello")
        await session.finish()
        await session.event("first_token")

        error = await session.failure()

        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert retry_after_ms(error) > 0
        await until(cluster.idle)
        await cluster.ends_with({State.FAILED: 1})


async def test_a_decode_worker_lost_before_it_began_is_replaced_by_one_that_computes_the_prompt(
    cluster_2x2: Cluster,
) -> None:
    session = cluster_2x2.session()
    await session.open("hello")
    await session.append(" world")
    dying = named(cluster_2x2, "decode-0").will_die()
    await session.finish()

    events = await session.answer()

    await dying
    assert text_of(events) == session_text("hello world")
    route = events[-1].completion.route
    assert (route.decode_worker_id, route.handoff) == ("decode-1", generation.HANDOFF_OUTCOME_RECOMPUTED)


async def test_the_answer_of_a_session_goes_on_at_another_decode_worker(cluster_2x2: Cluster) -> None:
    decoder = named(cluster_2x2, "decode-0").engine
    decoder.hold_before(4)
    session = cluster_2x2.session()
    await session.open("hello")
    await session.append(" world")
    await session.finish()
    await decoder.held.wait()

    decoder.die("of a test")

    events = await session.answer()
    assert text_of(events) == session_text("hello world")
    assert [event.WhichOneof("event") for event in events].count("first_token") == 1
    completion = events[-1].completion
    assert (completion.route.decode_worker_id, completion.route.migrations) == ("decode-1", 1)
    assert completion.session.tokens.prompt_tokens == len("hello world")
    await until(cluster_2x2.idle)


async def test_the_answer_of_a_session_ends_with_a_hint_where_no_other_decode_worker_comes(cluster: Cluster) -> None:
    decoder = named(cluster, "decode-0").engine
    decoder.hold_before(4)
    session = cluster.session()
    await session.open("hello")
    await session.finish()
    await decoder.held.wait()

    decoder.die("of a test")

    error = await session.failure()
    assert (error.code(), retry_after_ms(error)) == (grpc.StatusCode.UNAVAILABLE, 2000)
    await until(cluster.idle)
    await cluster.ends_with({State.FAILED: 1})
