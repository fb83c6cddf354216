"""A request's whole way through the real router and the real workers' services, over fake engines, on loopback.

Every test ends with a check that nothing is left: no blocks, no leases, no in-flight counts, one outcome a request.
"""

import asyncio
import math

import pytest
from rachis.v1 import generation_pb2 as generation

from cluster_core.engine_jobs import SamplingSpec
from control_plane.model.lifecycle import State
from control_plane.model.prefix_scope import PrefixScope
from fault_sim.blocks.pulls import KV_BYTES_PER_TOKEN
from tests.fakes.answers import collected, completion_of, text_of, tokens_of, whole_text
from tests.fakes.cluster import DECODE, PREFILL, Cluster, named, running_cluster, until
from tests.fakes.engine import expected_text


async def test_a_request_is_prefilled_handed_off_and_decoded_into_one_completion(cluster: Cluster) -> None:
    responses = await cluster.generate(request_id="mine")

    completion = completion_of(responses)
    assert text_of(responses) == whole_text()
    assert tokens_of(responses) == [ord(letter) for letter in whole_text()]
    assert {response.request_id for response in responses} == {"mine"}
    assert completion.finish_reason == generation.FINISH_REASON_LENGTH
    assert completion.usage == generation.Usage(prompt_tokens=5, completion_tokens=8, cached_tokens=0)
    assert completion.route == generation.Route(
        prefill_worker_id="prefill-0",
        decode_worker_id="decode-0",
        handoff=generation.HANDOFF_OUTCOME_PULLED,
        kv_bytes=5 * KV_BYTES_PER_TOKEN,
        pulled_tokens=5,
    )
    await cluster.ends_with({State.FINISHED: 1})


async def test_timings_are_set_and_fit_together(cluster: Cluster) -> None:
    timings = completion_of(await cluster.generate()).timings

    assert min(timings.transfer_ms, timings.queue_ms, timings.prefill_ms, timings.decode_ms) >= 0
    assert timings.ttft_ms > 0
    assert timings.queue_ms + timings.prefill_ms == pytest.approx(timings.ttft_ms, abs=1e-6)


async def test_the_first_token_leaves_before_the_decode_worker_has_begun(cluster: Cluster) -> None:
    decoder = named(cluster, "decode-0").engine
    decoder.hold_before(0)
    responses = aiter(cluster.call())

    first = await anext(responses)
    await decoder.held.wait()

    assert (first.delta.text, len(first.delta.token_ids)) == (whole_text()[0], 1)
    decoder.resume()
    assert first.delta.text + text_of([response async for response in responses]) == whole_text()


async def test_seeded_sampling_goes_on_where_the_prefill_worker_left_it(cluster: Cluster) -> None:
    assert text_of(await cluster.generate(temperature=1.0, seed=7)) == whole_text(seed=7)


async def test_both_workers_hear_of_the_cache_salt(cluster: Cluster) -> None:
    await cluster.generate(cache_salt="tenant-a")
    await cluster.generate()

    for name in ("prefill-0", "decode-0"):
        assert [job.cache_salt for job in named(cluster, name).engine.jobs] == ["tenant-a", ""]


async def test_both_workers_hear_of_the_priority_and_the_decode_worker_of_the_deadline(cluster: Cluster) -> None:
    await cluster.generate(priority=-5, timeout_s=30)
    await cluster.generate()

    first, second = named(cluster, "decode-0").engine.jobs
    assert (first.priority, second.priority) == (-5, 0)
    assert 0 < (first.deadline_s or 0) <= 31 < (second.deadline_s or 0) <= 600
    prefilled = [(job.priority, job.deadline_s) for job in named(cluster, "prefill-0").engine.jobs]
    assert prefilled == [(-5, None), (0, None)]


async def test_a_request_for_one_token_never_reaches_a_decode_worker(cluster: Cluster) -> None:
    completion = completion_of(await cluster.generate(max_tokens=1))

    assert completion.usage.completion_tokens == 1
    assert completion.route == generation.Route(prefill_worker_id="prefill-0", handoff=generation.HANDOFF_OUTCOME_NONE)
    assert named(cluster, "decode-0").engine.jobs == []


async def test_a_request_that_stops_at_its_first_token_ends_there(cluster: Cluster) -> None:
    responses = await cluster.generate(stop_token_ids=[ord(whole_text()[0])])

    assert completion_of(responses).finish_reason == generation.FINISH_REASON_STOP
    assert named(cluster, "decode-0").engine.jobs == []


async def test_a_stop_string_over_the_hand_off_is_never_shown(cluster: Cluster) -> None:
    text = whole_text()

    responses = await cluster.generate(stop=[text[:2]])

    assert text_of(responses) == ""
    assert completion_of(responses).finish_reason == generation.FINISH_REASON_STOP
    assert named(cluster, "decode-0").engine.jobs != []


async def test_text_held_back_for_a_stop_string_comes_with_the_next_delta(cluster: Cluster) -> None:
    responses = await cluster.generate(stop=["never so"])

    assert (responses[0].delta.text, len(responses[0].delta.token_ids)) == ("", 1)
    assert text_of(responses) == whole_text()


async def test_logprobs_come_for_every_token_on_both_sides_of_the_hand_off(cluster: Cluster) -> None:
    responses = await cluster.generate(logprobs=2)

    rows = [row for response in responses for row in response.delta.logprobs]
    assert [row.sampled.token_id for row in rows] == tokens_of(responses)
    assert all(len(row.top) == 2 for row in rows)


async def test_those_of_the_prompt_come_once_with_the_first_piece(cluster: Cluster) -> None:
    first, *others = await cluster.generate(prompt_logprobs=2)

    assert bytes(row.sampled.token_id for row in first.delta.prompt_logprobs) == b"ello"
    assert all(len(row.top) == 2 for row in first.delta.prompt_logprobs)
    assert not any(response.delta.prompt_logprobs for response in others)


async def test_a_hand_off_past_its_deadline_is_recomputed_and_its_lease_released(empty: Cluster) -> None:
    prefiller = await empty.add(PREFILL, deadline_s=0.0)
    await empty.add(DECODE)

    responses = await empty.generate()

    assert text_of(responses) == whole_text()
    assert completion_of(responses).route.handoff == generation.HANDOFF_OUTCOME_RECOMPUTED
    await until(lambda: prefiller.engine.status().counters.handoffs_released == 1)


async def test_requests_spread_over_idle_workers(cluster_2x2: Cluster) -> None:
    for worker in cluster_2x2.workers:
        worker.engine.hold_before(3)
    first = cluster_2x2.call()
    await named(cluster_2x2, "decode-0").engine.held.wait()

    second = cluster_2x2.call()
    await named(cluster_2x2, "decode-1").engine.held.wait()

    for worker in cluster_2x2.workers:
        worker.engine.resume()
    routes = [completion_of([response async for response in call]).route for call in (first, second)]
    assert [route.decode_worker_id for route in routes] == ["decode-0", "decode-1"]


async def test_a_decode_worker_that_computes_the_prompt_is_busy_with_it_until_its_first_token(cluster: Cluster) -> None:
    await cluster.unregister(named(cluster, "prefill-0"))
    engine = named(cluster, "decode-0").engine

    def busy() -> tuple[float, float]:
        """Requests there, and prompt tokens that are to be computed."""
        loads = cluster.router.membership.candidates(DECODE, 0.0)
        return float(loads.in_flight_requests[0]), float(loads.uncomputed_tokens[0])

    for held_before, expected in ((0, (1, 5)), (3, (1, 0))):
        engine.hold_before(held_before)
        running = asyncio.create_task(collected(cluster.call()))
        await engine.held.wait()
        await until(lambda expected=expected: busy() == expected)  # type: ignore[misc]
        engine.resume()
        await running


async def test_a_short_prompt_is_prefilled_where_it_is_decoded_unless_told_otherwise() -> None:
    async with running_cluster(placement__disaggregation="conditional") as cluster:
        await cluster.add(PREFILL)
        await cluster.add(DECODE)
        answer = await cluster.generate()
        route = completion_of(answer).route
        assert (route.prefill_worker_id, route.decode_worker_id) == ("", "decode-0")
        assert text_of(answer) == whole_text()


async def test_every_prompt_is_counted_as_asked_for_once(cluster: Cluster) -> None:
    """Without Redis, by this router alone."""
    prompt = "a prompt that fills a chunk. " * 6
    prefixes, placer = cluster.parts.prefixes, cluster.parts.placer
    for _ in range(3):
        await cluster.generate(prompt)
    keys = placer.packed(list(prompt.encode()), PrefixScope()).keys
    one = math.log(2) / 600

    def rate() -> float:
        return float(prefixes.index.hotness(keys, prefixes.accesses.now_s())[0])

    await until(lambda: rate() > 2.5 * one)
    assert rate() < 3.5 * one


async def test_two_requests_under_one_name_do_not_disturb_each_other(cluster: Cluster) -> None:
    prefiller = named(cluster, "prefill-0").engine
    prefiller.hold_before(0)
    calls = [cluster.call(request_id="same"), cluster.call(request_id="same")]
    await until(lambda: len(prefiller.jobs) == 2)
    prefiller.resume()

    answers = await asyncio.gather(*(collected(call) for call in calls))

    assert [text_of(answer) for answer in answers] == [whole_text()] * 2


async def test_many_requests_at_once_all_get_their_own_answer(cluster_2x2: Cluster) -> None:
    prompts = [f"prompt {number}" for number in range(40)]

    answers = await asyncio.gather(*(cluster_2x2.generate(prompt) for prompt in prompts))

    spec = SamplingSpec(max_tokens=8, temperature=0.0)
    assert [text_of(answer) for answer in answers] == [
        expected_text(tuple(prompt.encode()), spec) for prompt in prompts
    ]
    await cluster_2x2.ends_with({State.FINISHED: 40})
