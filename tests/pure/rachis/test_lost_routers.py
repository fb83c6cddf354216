"""When a client asks another router, and what it says of the answer so far."""

import pytest
from rachis.lost_routers import LostRouters, Received
from rachis.v1 import generation_pb2 as generation


def asked_again(*received: int) -> list[bool]:
    """Of routers that were gone after so many tokens of one answer: whether another one was asked."""
    lost = LostRouters()
    return [lost.may_go_on(tokens, 1.0) for tokens in received]


def test_an_answer_that_has_not_begun_is_asked_for_once_more() -> None:
    assert asked_again(0, 0) == [True, False]


def test_an_answer_that_has_begun_goes_on_while_something_comes_of_it() -> None:
    assert asked_again(1, 1, 1, 1) == [True, True, True, False]
    assert asked_again(0, 1, 1, 2, 2, 2, 3) == [True] * 7


def test_one_answer_takes_only_so_many_routers() -> None:
    assert asked_again(*range(1, 18)) == [True] * 16 + [False]


def test_a_router_that_served_for_long_was_not_ended_by_this_request() -> None:
    """A session may think for hours."""
    lost = LostRouters()
    assert [lost.may_go_on(0, now_s) for now_s in (0.0, 100.0, 200.0, 230.0)] == [True, True, True, False]


def test_what_is_copied_goes_its_own_way() -> None:
    received = Received()
    received.add(generation.CompletionDelta(token_ids=[7], text="n"))
    copied = received.copy()
    copied.add(generation.CompletionDelta(token_ids=[8], text="e"))
    assert (len(received), len(copied)) == (1, 2)
    assert copied.to_wire().text_characters == 2


def test_what_counts_as_resumed_had_begun() -> None:
    lost = LostRouters()
    for tokens in (0, 3, 4):
        assert lost.may_go_on(tokens, 1.0)
    assert (lost.lost, lost.resumed) == (3, 2)


def test_a_router_is_waited_for_longer_once_the_answer_has_begun() -> None:
    lost = LostRouters()
    lost.may_go_on(0, 1.0)
    before = lost.reconnect_s
    lost.may_go_on(1, 2.0)
    assert before < lost.reconnect_s


@pytest.mark.parametrize("reason", [generation.FINISH_REASON_UNSPECIFIED, generation.FINISH_REASON_STOP])
def test_what_was_received_is_told_as_tokens_characters_and_the_reason_to_end(
    reason: generation.FinishReason.ValueType,
) -> None:
    received = Received()
    received.add(generation.CompletionDelta(token_ids=[7, 8], text="né"))
    received.add(generation.CompletionDelta(token_ids=[9], text="💡", finish_reason=reason))

    told = received.to_wire()

    assert (list(told.token_ids), told.text_characters, told.finish_reason) == ([7, 8, 9], 3, reason)
    assert len(received) == 3
