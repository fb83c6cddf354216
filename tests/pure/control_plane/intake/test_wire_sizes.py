"""A message's sizes are judged before it is parsed, by what its bytes say alone."""

from contextlib import suppress
from random import Random
from typing import Any, cast

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import router_pb2 as api

from cluster_core.errors import ClientFault, InvalidInputError, OutOfRangeError
from control_plane.intake import wire_sizes
from control_plane.intake.wire_sizes import check_sizes
from control_plane.model.limits import MOST_ENTRIES
from tests.fakes.random_messages import damaged, message

MOST = 1000


def prompt(*ids: int) -> api.GenerateRequest:
    return api.GenerateRequest(prompt=generation.PromptInput(token_ids=generation.TokenIds(ids=ids)))


def chat(count: int) -> api.GenerateRequest:
    turns = [generation.ChatMessage(role="user", content="a")] * count
    return api.GenerateRequest(prompt=generation.PromptInput(chat=generation.ChatMessages(messages=turns)))


def update(*pieces: api.SessionPiece) -> api.StreamGenerateRequest:
    return api.StreamGenerateRequest(update=api.SessionUpdate(revision=1, context=pieces))


def looked_at(made: Message) -> None:
    descriptor: Any = made.DESCRIPTOR
    check_sizes(made.SerializeToString(), descriptor, MOST)


@pytest.mark.parametrize(
    ("made", "field"),
    [
        (prompt(*[0] * (5 * MOST + 1)), "prompt.token_ids.ids"),
        (prompt(*[1 << 31] * (MOST + 1)), "prompt.token_ids.ids"),
        (chat(MOST_ENTRIES + 1), "prompt.chat.messages"),
        (update(*[api.SessionPiece(text="")] * (MOST_ENTRIES + 1)), "update.context"),
        (
            update(*[api.SessionPiece(token_ids=generation.TokenIds(ids=[7] * 600))] * 10),
            "update.context.token_ids.ids",
        ),
    ],
)
def test_what_has_too_many_entries_is_refused_under_its_path(made: Message, field: str) -> None:
    with pytest.raises(OutOfRangeError) as refused:
        looked_at(made)
    assert refused.value.field == field


@pytest.mark.parametrize(
    "made",
    [
        prompt(*[1 << 31] * MOST),
        chat(MOST_ENTRIES),
        update(*[api.SessionPiece(text="long" * 10_000)] * 50),
        update(*[api.SessionPiece(document=api.Document(title="t", content="c"))] * MOST_ENTRIES),
        api.GenerateRequest(prompt=generation.PromptInput(text="x" * (1 << 20)), cache_salt="salt"),
    ],
)
def test_what_may_be_within_the_limits_passes(made: Message) -> None:
    looked_at(made)


def test_numbers_that_are_not_packed_are_entries() -> None:
    ids = b"\x08\x07" * (MOST_ENTRIES + 1)
    with pytest.raises(OutOfRangeError, match=f"ids: has more than {MOST_ENTRIES} entries that are not packed"):
        check_sizes(ids, generation.TokenIds.DESCRIPTOR, 1 << 20)


def test_unknown_fields_are_counted_too() -> None:
    with pytest.raises(OutOfRangeError, match=f"has more than {5 * MOST_ENTRIES} fields"):
        check_sizes(b"\xb8\x3e\x01" * 30_000, api.GenerateRequest.DESCRIPTOR, MOST)


@pytest.mark.parametrize("before", [b"\xa3\x06\xa4\x06", b"\x0e", b"\x0f"], ids=["a group", "kind 6", "kind 7"])
def test_what_no_message_of_ours_has_does_not_end_the_look(before: bytes) -> None:
    data = before + chat(MOST_ENTRIES + 1).SerializeToString()
    with pytest.raises(InvalidInputError, match="is not known here"):
        check_sizes(data, api.GenerateRequest.DESCRIPTOR, MOST)


def test_long_numbers_count_as_the_work_that_they_are() -> None:
    tag, number = b"\x98\x80\x80\x80\x01", b"\xff" * 9 + b"\x01"
    with pytest.raises(OutOfRangeError, match=f"has more than {5 * MOST_ENTRIES} fields"):
        check_sizes((tag + number) * 6000, api.GenerateRequest.DESCRIPTOR, MOST)


@given(st.integers(0, 1 << 32), st.sampled_from([api.GenerateRequest, api.StreamGenerateRequest]))
def test_random_and_damaged_messages_are_looked_at_without_a_defect(seed: int, kind: type[Message]) -> None:
    rng, descriptor = Random(seed), cast(Any, kind.DESCRIPTOR)
    with suppress(ClientFault):
        check_sizes(damaged(rng, message(rng, descriptor).SerializeToString()), descriptor, 1 << 20)


@given(st.binary(max_size=200))
def test_bytes_that_are_no_message_are_left_to_the_parser(data: bytes) -> None:
    with suppress(ClientFault):
        check_sizes(data, api.GenerateRequest.DESCRIPTOR, 1 << 20)


def test_the_work_of_a_look_does_not_grow_with_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in varints that are read, of the two messages that once took longest."""
    read = 0
    # The original, for the counting one below.
    varint = wire_sizes._Look._varint

    def counted(look: wire_sizes._Look, data: bytes, start: int, end: int) -> tuple[int, int]:
        nonlocal read
        read += 1
        return varint(look, data, start, end)

    # The one place where the work is done.
    monkeypatch.setattr(wire_sizes._Look, "_varint", counted)
    for made in (prompt(*[0] * (1 << 20)), chat(200_000)):
        read = 0
        with pytest.raises(OutOfRangeError):
            looked_at(made)
        assert read < 8 * MOST_ENTRIES
