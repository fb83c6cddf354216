"""Several answers to one prompt in one request: each as if it had been asked for alone, and the prompt prefilled once.

Every test ends with a check that nothing is left, as in `test_router_input`.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from rachis import AsyncClient, text_prompt
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import router_pb2 as api

from control_plane.dispatch.choices import run_choices
from control_plane.model.lifecycle import State
from tests.fakes.answers import collected, failure, field_of, whole_text
from tests.fakes.cluster import DECODE, PREFILL, Cluster, named, running_cluster, until

SEEDED: dict[str, Any] = {"temperature": 1.0, "seed": 5}
# Some blocks of it.
LONG = "hello" * 20


def ask(cluster: Cluster, n: int, received: tuple[api.ReceivedAnswer, ...] = (), **fields: Any) -> Any:
    cluster.calls += 1
    request = api.GenerateRequest(
        prompt=generation.PromptInput(text=fields.pop("text", "hello")),
        sampling=generation.SamplingParams(**{"temperature": 0.0, "max_tokens": 8, **fields}),
        n=n,
    )
    return cluster.api.Resume(api.ResumeRequest(request=request, received=received))


def texts_of(responses: list[api.GenerateResponse], n: int) -> list[str]:
    texts = [""] * n
    for response in responses:
        texts[response.choice] += response.delta.text
    return texts


async def test_a_choice_that_is_cancelled_under_a_call_is_not_waited_for() -> None:
    """Its pieces have filled the room that all have."""

    class Broken:
        async def run(self, job: str) -> AsyncIterator[str]:
            for _ in range(40 if job == "first" else 0):
                yield "piece"
            raise asyncio.CancelledError

    async with asyncio.timeout(60):
        with pytest.raises(asyncio.CancelledError):
            async for _ in run_choices(Broken(), ["first", "second"]):  # type: ignore[arg-type, list-item]
                pass


@pytest.mark.parametrize("n", [2, 5])
async def test_each_choice_is_the_answer_of_its_own_seed(cluster: Cluster, n: int) -> None:
    responses = await collected(ask(cluster, n, **SEEDED))

    assert texts_of(responses, n) == [whole_text(seed=5 + choice) for choice in range(n)]
    completions = [response for response in responses if response.HasField("completion")]
    assert sorted(response.choice for response in completions) == list(range(n))
    assert responses[-1].HasField("completion")
    assert {response.completion.usage.completion_tokens for response in completions} == {8}
    await cluster.ends_with({State.FINISHED: 1})


async def test_the_client_gives_each_choice_whole(cluster: Cluster) -> None:
    cluster.calls += 1
    async with AsyncClient(cluster.router.address) as client:
        choices = await client.generate_choices(text_prompt("hello"), 3, max_tokens=8, **SEEDED)

    assert [choice.text for choice in choices] == [whole_text(seed=seed) for seed in (5, 6, 7)]
    assert {choice.completion.finish_reason for choice in choices} == {generation.FINISH_REASON_LENGTH}


async def test_the_prompt_is_prefilled_once(cluster: Cluster) -> None:
    responses = await collected(ask(cluster, 4, text=LONG, **SEEDED))

    cached = {each.choice: each.completion.usage.cached_tokens for each in responses if each.HasField("completion")}
    assert cached[0] == 0
    assert all(len(LONG) - cached[choice] <= 16 for choice in (1, 2, 3)), cached


async def test_the_others_wait_for_the_first_token_of_the_first(cluster: Cluster) -> None:
    engine = named(cluster, "prefill-0").engine
    engine.hold_before(0)
    call = ask(cluster, 3, **SEEDED)
    await engine.held.wait()
    assert len(engine.jobs) == 1

    engine.resume()

    assert texts_of(await collected(call), 3) == [whole_text(seed=seed) for seed in (5, 6, 7)]
    assert len(engine.jobs) == 3


async def test_each_choice_takes_a_slot_and_one_request_may_want_more_than_there_are() -> None:
    async with running_cluster(router__max_in_flight_requests=2) as cluster:
        await cluster.add(PREFILL)
        engine, admission = (await cluster.add(DECODE)).engine, cluster.parts.admission
        engine.hold_before(4)
        running = asyncio.create_task(collected(ask(cluster, 5, **SEEDED)))
        await engine.held.wait()
        assert admission.in_flight == 5
        waiting = asyncio.create_task(cluster.generate())
        await until(lambda: admission.queued == 1)
        engine.resume()
        assert texts_of(await running, 5) == [whole_text(seed=5 + choice) for choice in range(5)]
        assert "".join(each.delta.text for each in await waiting) == whole_text()
        await until(lambda: admission.in_flight == 0)
        admission.check_invariants()


async def test_a_choice_that_has_ended_gives_its_slot_back(cluster: Cluster) -> None:
    engine, admission = named(cluster, "decode-0").engine, cluster.parts.admission
    ends, goes_on = (whole_text(seed=seed) for seed in (5, 6))
    stop = ends[1:3]
    assert stop not in goes_on[:5]
    engine.hold_before(5)
    running = asyncio.create_task(collected(ask(cluster, 2, stop=[stop], **SEEDED)))
    await engine.held.wait()
    await until(lambda: admission.in_flight == 1)
    engine.resume()
    assert texts_of(await running, 2)[0] == ends[:1]
    await until(lambda: admission.in_flight == 0)
    admission.check_invariants()


async def test_of_what_is_resumed_only_choices_that_had_not_ended_take_slots(cluster: Cluster) -> None:
    engine, admission = named(cluster, "decode-0").engine, cluster.parts.admission
    whole = await collected(ask(cluster, 3, **SEEDED))
    tokens = [
        [token for each in whole if each.choice == choice for token in each.delta.token_ids] for choice in (0, 1, 2)
    ]
    received = (
        api.ReceivedAnswer(token_ids=tokens[0], finish_reason=generation.FINISH_REASON_LENGTH),
        *(api.ReceivedAnswer(token_ids=tokens[choice][:2]) for choice in (1, 2)),
    )
    engine.hold_before(5)
    call = ask(cluster, 3, received, **SEEDED)
    told = []
    async for each in call:
        told.append(each)
        if each.HasField("completion"):
            break
    assert told[-1].choice == 0
    await engine.held.wait()
    assert admission.in_flight == 2
    engine.resume()
    told += [each async for each in call]
    assert sum(each.HasField("completion") for each in told) == 3
    await until(lambda: admission.in_flight == 0)


async def test_a_client_that_leaves_ends_all_choices(cluster: Cluster) -> None:
    engine = named(cluster, "decode-0").engine
    engine.hold_before(4)
    call = ask(cluster, 3, **SEEDED)
    await until(lambda: len(engine.jobs) == 3)

    call.cancel()

    await until(lambda: cluster.outcomes == {State.CANCELLED: 1})
    engine.resume()


async def test_a_choice_that_fails_ends_the_request() -> None:
    async with running_cluster(router__queue_timeout_s=0.2) as cluster:
        await cluster.add(PREFILL)
        decoder = await cluster.add(DECODE)
        decoder.engine.hold_before(4)
        call = ask(cluster, 2, **SEEDED)
        await until(lambda: len(decoder.engine.jobs) == 2)

        await decoder.crash()

        error = await failure(call)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        await until(lambda: cluster.outcomes == {State.FAILED: 1})
        decoder.engine.resume()


async def test_a_decode_worker_that_is_lost_costs_no_choice_its_answer(cluster_2x2: Cluster) -> None:
    decoders = [named(cluster_2x2, f"decode-{number}") for number in range(2)]
    decoders[0].engine.hold_before(4)
    running = asyncio.create_task(collected(ask(cluster_2x2, 4, **SEEDED)))
    await decoders[0].engine.held.wait()

    await decoders[0].crash()

    assert texts_of(await running, 4) == [whole_text(seed=5 + choice) for choice in range(4)]
    decoders[0].engine.resume()


async def test_every_choice_is_resumed_after_what_was_received_of_it(cluster: Cluster) -> None:
    whole = await collected(ask(cluster, 3, **SEEDED))
    tokens: list[list[int]] = [[], [], []]
    for response in whole:
        tokens[response.choice] += response.delta.token_ids
    received = (
        api.ReceivedAnswer(token_ids=tokens[0], text_characters=8, finish_reason=generation.FINISH_REASON_LENGTH),
        api.ReceivedAnswer(token_ids=tokens[1][:3], text_characters=3),
    )

    responses = await collected(ask(cluster, 3, received, **SEEDED))

    assert texts_of(responses, 3) == ["", whole_text(seed=6)[3:], whole_text(seed=7)]
    completions = {each.choice: each.completion for each in responses if each.HasField("completion")}
    assert [completions[choice].route.resumed_tokens for choice in range(3)] == [8, 3, 0]
    assert {completion.usage.completion_tokens for completion in completions.values()} == {8}


@pytest.mark.parametrize(
    ("n", "fields", "field"),
    [
        (17, {}, "n"),
        (2, {"seed": 2**64 - 1}, "sampling.seed"),
        (1, {"received": (api.ReceivedAnswer(), api.ReceivedAnswer())}, "received"),
        (2, {"received": (api.ReceivedAnswer(), api.ReceivedAnswer(token_ids=[256]))}, "received[1].token_ids"),
    ],
)
async def test_choices_that_cannot_be_are_refused(cluster: Cluster, n: int, fields: dict[str, Any], field: str) -> None:
    error = await failure(ask(cluster, n, **fields))

    assert field_of(error) == field
    await cluster.ends_with({State.REFUSED: 1})
