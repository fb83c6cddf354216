"""A session's whole way through the real router and the real workers' services, over fake engines, on loopback.

Every test ends with a check that nothing is left: no blocks, no leases, no in-flight counts, one outcome a session.
"""

import asyncio

import grpc
import pytest
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import router_pb2 as api

from cluster_core.engine_jobs import SessionMode
from control_plane.model.lifecycle import State
from fault_sim.blocks.pulls import KV_BYTES_PER_TOKEN
from tests.fakes.answers import session_text, text_of, tokens_of
from tests.fakes.cluster import DECODE, PREFILL, Cluster, named, running_cluster, until
from tests.fakes.session_call import SessionCall, session_open

# The answer.


async def test_appended_pieces_are_prefilled_handed_off_and_decoded_into_one_completion(cluster: Cluster) -> None:
    session = cluster.session()
    accepted = await session.open("hello", request_id="mine")
    await session.append(" wide")
    await session.append(" world")
    await session.finish("!")

    events = await session.answer()

    kinds = [event.WhichOneof("event") for event in events]
    assert kinds == ["first_token", *["delta"] * (len(events) - 2), "completion"]
    assert accepted.prefill_worker_id == "prefill-0"
    assert {event.request_id for event in events} == {"mine"}
    assert text_of(events) == session_text("hello wide world!")
    assert tokens_of(events) == list(session_text("hello wide world!").encode())
    completion = events[-1].completion
    assert completion.finish_reason == generation.FINISH_REASON_LENGTH
    assert completion.usage == generation.Usage(prompt_tokens=17, completion_tokens=8)
    assert completion.route == generation.Route(
        prefill_worker_id="prefill-0",
        decode_worker_id="decode-0",
        handoff=generation.HANDOFF_OUTCOME_PULLED,
        kv_bytes=17 * KV_BYTES_PER_TOKEN,
        pulled_tokens=17,
    )
    await cluster.ends_with({State.FINISHED: 1})


async def test_all_messages_at_once_on_a_closed_stream_give_the_answer(cluster: Cluster) -> None:
    messages = [
        api.StreamGenerateRequest(open=session_open("hello", "APPEND")),
        api.StreamGenerateRequest(append=api.SessionAppend(piece=api.SessionPiece(text=" world"))),
        api.StreamGenerateRequest(finish=api.SessionFinish()),
    ]
    cluster.calls += 1

    events = [event async for event in cluster.api.StreamGenerate(iter(messages))]

    assert text_of(events) == session_text("hello world")


async def test_a_session_without_prefix_begins_with_its_context(cluster: Cluster) -> None:
    session = cluster.session()
    await session.open(None)
    await session.append("hello")
    await session.finish()

    assert text_of(await session.answer()) == session_text("hello")


async def test_an_update_replaces_the_context_and_an_append_adds_to_it(cluster: Cluster) -> None:
    session = cluster.session()
    await session.open("hello", "UPDATE")
    await session.append(" first")
    await session.update(1, " second", " third")
    await session.append(" fourth")
    await session.finish("?")

    assert text_of(await session.answer()) == session_text("hello second third fourth?")


@pytest.mark.parametrize(
    ("texts", "prompt"),
    [
        ([" wide world"], "hello wide world"),
        ([" wide"], "hello wide"),
        ([], "hello"),
        (["w"], "hellow"),
        ([" wide world and more"], "hello wide world and more"),
    ],
    ids=["same", "shortened below what is computed", "empty", "nothing in common", "longer"],
)
async def test_an_update_of_a_computed_context_gives_the_answer_of_the_new_one(
    cluster: Cluster, texts: list[str], prompt: str
) -> None:
    session = cluster.session()
    await session.open("hello", "UPDATE")
    await session.append(" wide world")
    await session.progressed(lambda progress: progress.ready_tokens >= 15)
    await session.update(1, *texts)
    await session.finish()

    assert text_of(await session.answer()) == session_text(prompt)


async def test_an_update_to_the_same_text_invalidates_nothing(cluster: Cluster) -> None:
    session = cluster.session()
    await session.open("hello", "UPDATE")
    await session.update(1, " wide world")
    await session.progressed(lambda progress: progress.ready_tokens >= 15)
    await session.update(2, " wide", " world")
    await session.finish()

    tokens = (await session.answer())[-1].completion.session.tokens

    assert (tokens.invalidated_tokens, tokens.computed_tokens) == (0, 16)
    assert tokens.inputs == 2


async def test_an_update_keeps_the_common_prefix_at_the_worker(cluster: Cluster) -> None:
    session = cluster.session()
    await session.open("hello", "UPDATE")
    await session.update(1, " wide world")
    await session.progressed(lambda progress: progress.ready_tokens >= 15)
    await session.update(2, " wide, wide world")
    await session.finish()

    tokens = (await session.answer())[-1].completion.session.tokens

    assert tokens.invalidated_tokens == len("hello wide world") - 1 - len("hello wide")


async def test_documents_and_token_ids_are_pieces_like_texts(cluster: Cluster) -> None:
    session = cluster.session()
    await session.open("hello ")
    for piece in (
        api.SessionPiece(document=api.Document(title="Title", content="content")),
        api.SessionPiece(document=api.Document(content="untitled")),
        api.SessionPiece(token_ids=generation.TokenIds(ids=list(b"ids"))),
    ):
        await session.send(append=api.SessionAppend(piece=piece))
    await session.finish()

    assert text_of(await session.answer()) == session_text("hello Title\ncontent\n\nuntitled\n\nids")


async def test_thousands_of_appends_of_one_token_give_the_answer_of_the_whole_prompt(cluster: Cluster) -> None:
    session = cluster.session()
    await session.open("hello", "UPDATE")
    for revision in range(6):
        await session.update(revision)
        for _ in range(400):
            await session.append("x")
    await session.finish()

    events = await session.answer()

    assert text_of(events) == session_text("hello" + "x" * 400)
    assert events[-1].completion.session.tokens.inputs == 6 * 401


async def test_empty_appends_change_nothing(cluster: Cluster) -> None:
    session = cluster.session()
    await session.open("hello")
    await session.append("")
    await session.send(append=api.SessionAppend(piece=api.SessionPiece(token_ids=generation.TokenIds())))
    await session.finish()

    events = await session.answer()

    assert text_of(events) == session_text("hello")
    assert events[-1].completion.session.tokens.inputs == 2


async def test_a_session_for_one_token_never_reaches_a_decode_worker(cluster: Cluster) -> None:
    session = cluster.session()
    await session.open("hello", max_tokens=1)
    await session.finish()

    events = await session.answer()

    assert [event.WhichOneof("event") for event in events] == ["first_token", "completion"]
    assert text_of(events) == session_text("hello", 1)
    assert named(cluster, "decode-0").engine.jobs == []


async def test_sessions_and_requests_run_beside_each_other(cluster_2x2: Cluster) -> None:
    async def one(name: str) -> None:
        session = cluster_2x2.session()
        await session.open(name)
        for letter in "streamed":
            await session.append(letter)
        await session.finish()
        assert text_of(await session.answer()) == session_text(f"{name}streamed")

    await asyncio.gather(*(one(f"session {number} ") for number in range(20)), cluster_2x2.generate())


# Chat.


def chat(*messages: tuple[str, str]) -> generation.PromptInput:
    turns = [generation.ChatMessage(role=role, content=content) for role, content in messages]
    return generation.PromptInput(chat=generation.ChatMessages(messages=turns))


async def open_chat(cluster: Cluster) -> SessionCall:
    session = cluster.session()
    opened = session_open(None, "APPEND")
    opened.prefix.CopyFrom(chat(("system", "be brief"), ("user", "read: ")))
    await session.send(open=opened)
    await session.event("accepted")
    await session.append("this")
    return session


async def test_pieces_go_inside_the_last_chat_message_and_finish_ends_it(cluster: Cluster) -> None:
    session = await open_chat(cluster)
    await session.finish(" and that")

    assert text_of(await session.answer()) == session_text("be brief\nread: this and that\n")


async def test_closing_chat_messages_are_turns_after_the_open_one(cluster: Cluster) -> None:
    session = await open_chat(cluster)
    await session.send(finish=api.SessionFinish(closing=chat(("assistant", "yes"), ("user", "so?"))))

    assert text_of(await session.answer()) == session_text("be brief\nread: this\nyes\nso?\n")


async def test_closing_messages_that_change_what_was_rendered_before_are_refused(cluster: Cluster) -> None:
    session = await open_chat(cluster)
    await session.send(finish=api.SessionFinish(closing=chat(("user", "~so?"))))

    assert await session.refused() == ("INVALID_ARGUMENT", "finish.closing.chat", 3)
    await session.finish()
    assert text_of(await session.answer()) == session_text("be brief\nread: this\n")


# What is told meanwhile.


async def test_prefill_of_what_is_known_begins_before_finish(cluster: Cluster) -> None:
    session = cluster.session()
    await session.open("hello")
    await session.append(" world")

    progress = await session.progressed(lambda progress: progress.ready_tokens >= 10)

    assert (progress.received_tokens, progress.prompt_tokens, progress.computed_tokens) == (11, 11, 10)
    assert progress.inputs == 1
    assert named(cluster, "prefill-0").engine.jobs == []
    await session.finish()
    assert text_of(await session.answer()) == session_text("hello world")


async def test_progress_is_coalesced_to_one_event_per_interval() -> None:
    async with running_cluster(streaming__progress_interval_ms=60_000) as cluster:
        await cluster.add(PREFILL)
        await cluster.add(DECODE)
        session = cluster.session()
        await session.open("hello")
        for _ in range(100):
            await session.append("x")
        await session.finish()

        assert text_of(await session.answer()) == session_text("hello" + "x" * 100)
        assert session.progress_events <= 1


async def test_the_first_token_tells_both_times_and_the_record_repeats_them(cluster: Cluster) -> None:
    session = cluster.session()
    await session.open("hello")
    await session.append(" world")
    await session.progressed(lambda progress: progress.inputs == 1)
    await session.finish()

    events = await session.answer()

    first, completion = events[0].first_token, events[-1].completion
    assert 0 < first.ttft_from_finish_ms < first.ttft_from_open_ms
    assert completion.session.ttft_from_open_ms == first.ttft_from_open_ms == completion.timings.ttft_ms
    assert completion.session.ttft_from_finish_ms == first.ttft_from_finish_ms
    assert completion.session.tokens.prompt_tokens == 11
    assert completion.session.events[-1].kind == generation.SESSION_EVENT_KIND_FINISHED
    assert completion.timings.queue_ms + completion.timings.prefill_ms == pytest.approx(first.ttft_from_open_ms)


async def test_the_first_token_leaves_before_the_decode_worker_has_begun(cluster: Cluster) -> None:
    decoder = named(cluster, "decode-0").engine
    decoder.hold_before(0)
    session = cluster.session()
    await session.open("hello")
    await session.finish()

    first = await session.event("first_token")
    await decoder.held.wait()

    assert first.first_token.delta.text == session_text("hello")[0]
    decoder.resume()
    assert first.first_token.delta.text + text_of(await session.answer()) == session_text("hello")


async def test_the_worker_hears_mode_salt_and_one_token_sampling(cluster: Cluster) -> None:
    session = cluster.session()
    await session.open("hello", "UPDATE", cache_salt="tenant-a")
    await session.finish()
    await session.answer()

    [opened] = named(cluster, "prefill-0").engine.sessions
    assert (opened.mode, opened.job.cache_salt) == (SessionMode.UPDATE, "tenant-a")
    assert (opened.job.sampling.max_tokens, opened.job.hand_off) == (1, True)


async def test_both_workers_hear_of_the_sessions_priority(cluster: Cluster) -> None:
    session = cluster.session()
    await session.open("hello", priority=9)
    await session.finish()
    await session.answer()

    assert [job.priority for job in named(cluster, "decode-0").engine.jobs] == [9]
    assert [opened.job.priority for opened in named(cluster, "prefill-0").engine.sessions] == [9]


async def test_a_session_holds_its_admission_slot_while_it_computes() -> None:
    async with running_cluster(router__max_in_flight_requests=1, router__max_queued_requests=0) as cluster:
        prefiller = (await cluster.add(PREFILL)).engine
        await cluster.add(DECODE)
        prefiller.compute_at_most(2)
        session = cluster.session()
        await session.open("hello")

        refused = cluster.session()
        await refused.send(open=session_open("hello", "APPEND"))
        error = await refused.failure()

        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        prefiller.resume()
        await session.finish()
        assert text_of(await session.answer()) == session_text("hello")
        await until(cluster.idle)
        await cluster.ends_with({State.FINISHED: 1, State.REFUSED: 1})
