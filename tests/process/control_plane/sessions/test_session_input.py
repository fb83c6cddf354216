"""Bad input to a session: before it is accepted it ends the call, after that it is answered and changes nothing.

Every test ends with a check that nothing is left: no blocks, no leases, no in-flight counts, one outcome a session.
"""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import router_pb2 as api

from control_plane.model.lifecycle import State
from tests.fakes.answers import field_of, retry_after_ms, session_text, text_of
from tests.fakes.cluster import DECODE, PREFILL, Cluster, named, running_cluster, until
from tests.fakes.session_call import SessionCall, session_open

# Refused before it is accepted: the call ends.


def opening(**values: Any) -> api.StreamGenerateRequest:
    return api.StreamGenerateRequest(open=session_open(values.pop("prefix", "hello"), "APPEND", **values))


def opening_with(**fields: Any) -> api.StreamGenerateRequest:
    opened = session_open(None, "UPDATE")
    opened.MergeFrom(api.SessionOpen(**fields))
    return api.StreamGenerateRequest(open=opened)


INVALID, TOO_MUCH = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE


@pytest.mark.parametrize(
    ("message", "code", "field"),
    [
        (api.StreamGenerateRequest(), INVALID, "open"),
        (api.StreamGenerateRequest(append=api.SessionAppend()), INVALID, "open"),
        (api.StreamGenerateRequest(cancel=api.SessionCancel()), INVALID, "open"),
        (api.StreamGenerateRequest(open=api.SessionOpen()), INVALID, "open.mode"),
        (opening(model="other"), INVALID, "open.model"),
        (opening(request_id="x" * 129), INVALID, "open.request_id"),
        (opening(cache_salt="x" * 129), INVALID, "open.cache_salt"),
        (opening(priority=1001), INVALID, "open.priority"),
        (opening(temperature=-1.0), INVALID, "open.sampling.temperature"),
        (opening(min_tokens=9), INVALID, "open.sampling.min_tokens"),
        (opening(stop_token_ids=[256]), TOO_MUCH, "open.sampling.stop_token_ids"),
        (opening(structured_outputs=generation.StructuredOutputs()), INVALID, "open.sampling.structured_outputs"),
        (
            opening(structured_outputs=generation.StructuredOutputs(regex="bad (")),
            INVALID,
            "open.sampling.structured_outputs.regex",
        ),
        (opening(max_tokens=512), TOO_MUCH, "open.sampling.max_tokens"),
        (opening(prompt_logprobs=0), grpc.StatusCode.UNIMPLEMENTED, "open.sampling.prompt_logprobs"),
        (opening(prefix="x" * 505), TOO_MUCH, "open.prefix"),
        (
            opening_with(prefix=generation.PromptInput(token_ids=generation.TokenIds(ids=[256]))),
            TOO_MUCH,
            "open.prefix.token_ids",
        ),
        (
            opening_with(prefix=generation.PromptInput(chat=generation.ChatMessages())),
            INVALID,
            "open.prefix.chat.messages",
        ),
    ],
)
async def test_a_bad_first_message_ends_the_call_before_any_worker_hears_of_it(
    cluster: Cluster, message: api.StreamGenerateRequest, code: grpc.StatusCode, field: str
) -> None:
    session = cluster.session()
    await session.call.write(message)

    error = await session.failure()

    assert (error.code(), field_of(error)) == (code, field)
    await until(cluster.idle)
    await cluster.ends_with({State.REFUSED: 1})
    assert named(cluster, "prefill-0").engine.sessions == []


async def test_a_stream_that_is_closed_without_any_message_is_refused(cluster: Cluster) -> None:
    session = cluster.session()
    await session.call.done_writing()

    error = await session.failure()

    assert (error.code(), field_of(error)) == (INVALID, "open")


async def test_bytes_that_are_no_message_end_a_session_that_is_not_open(cluster: Cluster) -> None:
    cluster.calls += 1
    call = cluster.channel.stream_stream("/rachis.v1.RouterService/StreamGenerate", None, None)(iter([b"\xff\xff"]))

    error = await SessionCall(call).failure()

    assert (error.code(), field_of(error)) == (INVALID, "request")


async def test_where_no_worker_registers_a_session_is_told_to_come_back() -> None:
    async with running_cluster(router__queue_timeout_s=0.3) as empty:
        session = empty.session()
        await session.call.write(opening())

        error = await session.failure()

        assert (error.code(), retry_after_ms(error)) == (grpc.StatusCode.UNAVAILABLE, 1000)


# Refused afterwards: the session goes on, nothing is lost.

Bad = Callable[[SessionCall], Awaitable[None]]


def sending(**event: Any) -> Bad:
    return lambda session: session.send(**event)


def appending(**piece: Any) -> Bad:
    return sending(append=api.SessionAppend(piece=api.SessionPiece(**piece)))


def finishing(**closing: Any) -> Bad:
    return sending(finish=api.SessionFinish(closing=generation.PromptInput(**closing)))


OUTSIDE = generation.TokenIds(ids=[97, 256])
TURNS = generation.ChatMessages(messages=[generation.ChatMessage(role="user", content="so?")])


@pytest.mark.parametrize(
    ("bad", "status", "field"),
    [
        (sending(), "INVALID_ARGUMENT", "event"),
        (sending(open=session_open("hello", "APPEND")), "FAILED_PRECONDITION", "open"),
        (sending(append=api.SessionAppend()), "INVALID_ARGUMENT", "append.piece"),
        (appending(token_ids=OUTSIDE), "OUT_OF_RANGE", "append.piece.token_ids"),
        (appending(text="x" * 500), "OUT_OF_RANGE", "append.piece"),
        (lambda session: session.update(1, "new"), "FAILED_PRECONDITION", "update"),
        (lambda session: session.finish("x" * 500), "OUT_OF_RANGE", "finish.closing"),
        (finishing(token_ids=OUTSIDE), "OUT_OF_RANGE", "finish.closing.token_ids"),
        (finishing(chat=TURNS), "INVALID_ARGUMENT", "finish.closing.chat"),
    ],
    ids=[
        "no event",
        "second open",
        "append without piece",
        "append outside the vocabulary",
        "append over the model's length",
        "update in append mode",
        "finish over the model's length",
        "closing outside the vocabulary",
        "closing chat after text",
    ],
)
async def test_a_bad_message_to_a_session_in_append_mode_is_refused_and_it_goes_on(
    cluster: Cluster, bad: Bad, status: str, field: str
) -> None:
    session = cluster.session()
    await session.open("hello")
    await session.append(" world")
    await bad(session)

    assert await session.refused() == (status, field, 3)

    await session.append(" and more")
    await session.finish()
    assert text_of(await session.answer()) == session_text("hello world and more")


def updating(revision: int, *pieces: api.SessionPiece) -> Bad:
    return sending(update=api.SessionUpdate(revision=revision, context=pieces))


@pytest.mark.parametrize(
    ("bad", "status", "field"),
    [
        (updating(6), "ABORTED", "update.revision"),
        (updating(7), "ABORTED", "update.revision"),
        (updating(8, api.SessionPiece()), "INVALID_ARGUMENT", "update.context[0]"),
        (
            updating(8, api.SessionPiece(text="fine"), api.SessionPiece(token_ids=OUTSIDE)),
            "OUT_OF_RANGE",
            "update.context[1].token_ids",
        ),
        (
            updating(8, api.SessionPiece(text="x" * 300), api.SessionPiece(text="x" * 300)),
            "OUT_OF_RANGE",
            "update.context",
        ),
    ],
    ids=["revision going back", "same revision", "piece not set", "outside the vocabulary", "over the model's length"],
)
async def test_a_bad_update_is_refused_and_what_was_there_stands(
    cluster: Cluster, bad: Bad, status: str, field: str
) -> None:
    session = cluster.session()
    await session.open("hello", "UPDATE")
    await session.update(7, " world")
    await bad(session)

    assert await session.refused() == (status, field, 3)

    await session.append("!")
    await session.finish()
    assert text_of(await session.answer()) == session_text("hello world!")


async def test_a_revision_whose_update_was_refused_can_be_used_again(cluster: Cluster) -> None:
    session = cluster.session()
    await session.open("hello", "UPDATE")
    await session.update(1, "x" * 600)
    await session.update(1, " world")
    await session.finish()

    assert await session.refused() == ("OUT_OF_RANGE", "update.context", 2)
    assert text_of(await session.answer()) == session_text("hello world")


async def test_an_append_over_the_models_length_never_reaches_the_worker(cluster: Cluster) -> None:
    session = cluster.session()
    await session.open("hello")
    await session.append("x" * 499)
    await session.append("y")
    assert await session.refused() == ("OUT_OF_RANGE", "append.piece", 3)
    await session.finish()

    events = await session.answer()

    assert text_of(events) == session_text("hello" + "x" * 499)
    assert events[-1].completion.session.tokens.received_tokens == 504


async def test_what_closes_a_chat_is_kept_free_for_it(cluster: Cluster) -> None:
    messages = [generation.ChatMessage(role="user", content="hello")]
    session = cluster.session()
    opened = session_open(None, "APPEND")
    opened.prefix.CopyFrom(generation.PromptInput(chat=generation.ChatMessages(messages=messages)))
    await session.send(open=opened)
    await session.event("accepted")
    await session.append("x" * 499)

    assert await session.refused() == ("OUT_OF_RANGE", "append.piece", 2)

    await session.append("x" * 498)
    await session.finish()
    assert text_of(await session.answer()) == session_text("hello" + "x" * 498 + "\n")


async def test_an_empty_prompt_cannot_be_finished_and_the_session_goes_on(cluster: Cluster) -> None:
    session = cluster.session()
    await session.open(None)
    await session.finish()
    assert await session.refused() == ("INVALID_ARGUMENT", "finish", 2)

    await session.append("hello")
    await session.finish()
    assert text_of(await session.answer()) == session_text("hello")


async def test_bytes_that_are_no_message_are_refused_under_their_field_and_the_session_goes_on(
    cluster: Cluster,
) -> None:
    def good(**event: Any) -> bytes:
        return api.StreamGenerateRequest(**event).SerializeToString()

    spoiled = good(append=api.SessionAppend(piece=api.SessionPiece(text="good"))).replace(b"good", b"\xff\xfe\xfd\xfc")
    messages = [good(open=session_open("hello", "APPEND")), spoiled, b"\xff\xff", good(finish=api.SessionFinish())]
    cluster.calls += 1
    call = cluster.channel.stream_stream(
        "/rachis.v1.RouterService/StreamGenerate", None, api.StreamGenerateResponse.FromString
    )(iter(messages))
    session = SessionCall(call)

    await session.event("accepted")
    assert await session.refused() == ("INVALID_ARGUMENT", "append.piece.text", 2)
    assert await session.refused() == ("INVALID_ARGUMENT", "request", 3)
    assert text_of(await session.answer()) == session_text("hello")


async def test_a_message_over_the_size_limit_is_refused_and_the_session_goes_on() -> None:
    async with running_cluster(router__max_message_mib=1) as cluster:
        await cluster.add(PREFILL)
        await cluster.add(DECODE)
        session = cluster.session()
        await session.open("hello")
        await session.append("x" * (1 << 20))
        assert await session.refused() == ("OUT_OF_RANGE", "request", 2)

        await session.finish()
        assert text_of(await session.answer()) == session_text("hello")


# After finish.


@pytest.mark.parametrize(
    ("late", "field"),
    [
        (appending(text="late"), "append"),
        (updating(9), "update"),
        (sending(finish=api.SessionFinish()), "finish"),
        (sending(open=session_open("hello", "APPEND")), "open"),
    ],
    ids=["append", "update", "finish", "open"],
)
@pytest.mark.parametrize("held", ["prefill-0", "decode-0"])
async def test_input_after_finish_is_refused_while_the_answer_is_on_its_way(
    cluster: Cluster, late: Bad, field: str, held: str
) -> None:
    """Also while the hand-off runs, which the held decode worker has not begun to pull for."""
    engine = named(cluster, held).engine
    engine.hold_before(0)
    session = cluster.session()
    await session.open("hello", "UPDATE")
    await session.finish()
    await engine.held.wait()
    events = [] if held == "prefill-0" else [await session.event("first_token")]
    await late(session)

    assert await session.refused() == ("FAILED_PRECONDITION", field, 3)

    engine.resume()
    assert text_of(events + await session.answer()) == session_text("hello")
    await until(cluster.idle)
    await cluster.ends_with({State.FINISHED: 1})


async def test_every_refusal_is_told_in_order_with_the_number_of_its_message(cluster: Cluster) -> None:
    session = cluster.session()
    await session.open("hello")
    for _ in range(300):
        await session.send()
    await session.finish()

    numbers = [(await session.refused())[2] for _ in range(300)]

    assert numbers == list(range(2, 302))
    assert text_of(await session.answer()) == session_text("hello")
