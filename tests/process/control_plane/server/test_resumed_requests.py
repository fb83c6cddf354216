"""`Resume`: a router goes on with an answer that another one has begun, and refuses what cannot be gone on with.

Every test ends with a check that nothing is left, as in `test_router_input`.
"""

from typing import Any

import grpc
import pytest
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import router_pb2 as api

from control_plane.model.job import Job
from control_plane.model.lifecycle import State
from tests.fakes.answers import collected, completion_of, failure, field_of, text_of, tokens_of, whole_text
from tests.fakes.cluster import PREFILL, Cluster, named, running_cluster


def resume(cluster: Cluster, received: api.ReceivedAnswer, text: str = "hello", **sampling: Any) -> Any:
    cluster.calls += 1
    request = api.GenerateRequest(
        prompt=generation.PromptInput(text=text),
        sampling=generation.SamplingParams(**{"temperature": 0.0, "max_tokens": 8, **sampling}),
    )
    return cluster.api.Resume(api.ResumeRequest(request=request, received=[received]))


@pytest.mark.parametrize("sampling", [{}, {"seed": 5, "temperature": 1.0}])
@pytest.mark.parametrize("cut", range(1, 8))
async def test_an_answer_goes_on_after_any_of_its_tokens(cluster: Cluster, cut: int, sampling: dict[str, Any]) -> None:
    tokens = tokens_of(await cluster.generate(**sampling))

    responses = await collected(
        resume(cluster, api.ReceivedAnswer(token_ids=tokens[:cut], text_characters=cut), **sampling)
    )

    assert tokens_of(responses) == tokens[cut:]
    # The engine shows one character a token.
    assert text_of(responses) == whole_text(seed=sampling.get("seed"))[cut:]
    completion = completion_of(responses)
    assert completion.usage.completion_tokens == 8
    assert (completion.route.resumed_tokens, completion.route.migrations) == (cut, 0)


async def test_what_was_shown_of_the_text_does_not_come_again(cluster: Cluster) -> None:
    tokens = tokens_of(await cluster.generate())

    responses = await collected(resume(cluster, api.ReceivedAnswer(token_ids=tokens[:4], text_characters=2)))

    assert text_of(responses) == whole_text()[2:]


async def test_without_anything_received_the_answer_begins(cluster: Cluster) -> None:
    responses = await collected(resume(cluster, api.ReceivedAnswer()))

    assert text_of(responses) == whole_text()
    assert completion_of(responses).route.resumed_tokens == 0
    assert cluster.router.metrics.registry.get_sample_value("rachis_resumed_requests_total") == 0


async def test_the_last_piece_says_why_the_answer_ends(cluster: Cluster) -> None:
    *pieces, last, completion = await cluster.generate()

    assert {piece.delta.finish_reason for piece in pieces} == {generation.FINISH_REASON_UNSPECIFIED}
    assert last.delta.finish_reason == completion.completion.finish_reason == generation.FINISH_REASON_LENGTH
    (only, _) = await cluster.generate(max_tokens=1)
    assert only.delta.finish_reason == generation.FINISH_REASON_LENGTH


async def test_the_prompt_of_a_resumed_answer_was_counted_before(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[Job] = []
    # Accesses are counted in an index whose heat decays: the test sees the calls.
    monkeypatch.setattr(cluster.parts.placer, "keep", counted.append)
    tokens = tokens_of(await cluster.generate())

    await collected(resume(cluster, api.ReceivedAnswer(token_ids=tokens[:4], text_characters=4)))

    assert len(counted) == 1


async def test_an_answer_goes_on_where_no_prefill_worker_is_left(cluster: Cluster) -> None:
    tokens = tokens_of(await cluster.generate())
    await named(cluster, "prefill-0").crash()

    responses = await collected(resume(cluster, api.ReceivedAnswer(token_ids=tokens[:3], text_characters=3)))

    assert tokens_of(responses) == tokens[3:]


@pytest.mark.parametrize(
    ("received", "field", "sentence"),
    [
        ({"token_ids": [1] * 9}, "received[0].token_ids", "has 9 tokens, max_tokens is 8"),
        ({"token_ids": [1] * 8}, "received[0].finish_reason", "its last piece says why"),
        ({"token_ids": [1], "finish_reason": 9}, "received[0].finish_reason", "9"),
        ({"text_characters": 1}, "received[0].token_ids", "must not be empty"),
        ({"finish_reason": 1}, "received[0].token_ids", "must not be empty"),
        ({"token_ids": [256]}, "received[0].token_ids", "outside the vocabulary"),
    ],
)
async def test_what_cannot_be_gone_on_with_is_refused(
    cluster: Cluster, received: dict[str, Any], field: str, sentence: str
) -> None:
    error = await failure(resume(cluster, api.ReceivedAnswer(**received)))

    assert error.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE)
    assert sentence in (error.details() or "")
    assert field_of(error) == field
    await cluster.ends_with({State.REFUSED: 1})


async def test_a_request_that_is_not_there_is_refused(cluster: Cluster) -> None:
    cluster.calls += 1

    error = await failure(cluster.api.Resume(api.ResumeRequest(received=[api.ReceivedAnswer(token_ids=[1])])))

    assert (error.code(), field_of(error)) == (grpc.StatusCode.INVALID_ARGUMENT, "prompt")


async def test_the_completion_of_a_whole_answer_needs_no_worker() -> None:
    async with running_cluster() as cluster:
        # It knows the model by it, and gives it nothing.
        worker = await cluster.add(PREFILL)
        received = api.ReceivedAnswer(token_ids=[1, 2], text_characters=2, finish_reason=generation.FINISH_REASON_STOP)

        (response,) = await collected(resume(cluster, received))

        assert response.completion.finish_reason == generation.FINISH_REASON_STOP
        assert response.completion.usage == generation.Usage(prompt_tokens=5, completion_tokens=2)
        await cluster.ends_with({State.FINISHED: 1})
        assert worker.engine.jobs == []


async def test_what_is_resumed_as_a_session_is_checked_like_a_request(cluster: Cluster) -> None:
    session = cluster.session()
    await session.send(
        open=api.SessionOpen(
            mode=generation.SESSION_MODE_APPEND,
            sampling=generation.SamplingParams(max_tokens=2),
            received=api.ReceivedAnswer(token_ids=[1, 2]),
        )
    )

    error = await failure(session.call)

    assert field_of(error) == "open.received.finish_reason"


async def test_the_completion_of_a_whole_session_needs_no_worker(cluster: Cluster) -> None:
    session = cluster.session()
    received = api.ReceivedAnswer(token_ids=[1, 2], text_characters=2, finish_reason=generation.FINISH_REASON_STOP)
    await session.open("hello", received=received)
    await session.append(" wide")
    await session.finish(" world")

    event = await session.event("completion")

    assert event.completion.usage == generation.Usage(prompt_tokens=16, completion_tokens=2)
    assert not named(cluster, "prefill-0").engine.sessions
    assert not named(cluster, "decode-0").engine.jobs
