"""What a session has sent, told to one call and then to another."""

from rachis.outbox import KeptBytes, Outbox, Sent
from rachis.v1 import router_pb2 as api


def message(text: str) -> api.StreamGenerateRequest:
    return api.StreamGenerateRequest(append=api.SessionAppend(piece=api.SessionPiece(text=text)))


async def told(outbox: Outbox, count: int) -> list[str]:
    """What a call takes of it."""
    texts = []
    for _ in range(count):
        texts.append((await outbox.next()).append.piece.text)
        outbox.written()
    return texts


def filled(*texts: str, budget: KeptBytes | None = None) -> tuple[Outbox, list[Sent]]:
    outbox = Outbox(budget or KeptBytes(1000))
    return outbox, [outbox.add(message(text)) for text in texts]


def numbers(outbox: Outbox, places: int) -> list[int]:
    return [outbox.number_of(place) for place in range(1, places + 1)]


async def test_another_call_is_told_everything_in_order() -> None:
    outbox, _ = filled("a", "b", "c")
    assert await told(outbox, 2) == ["a", "b"]

    outbox.start_again()
    outbox.add(message("d"))

    assert await told(outbox, 4) == ["a", "b", "c", "d"]
    assert numbers(outbox, 5) == [1, 2, 3, 4, 0]


async def test_what_was_being_written_when_a_call_ended_is_told_to_the_next_one_once() -> None:
    outbox, (first, second) = filled("a", "b")
    await told(outbox, 1)
    await outbox.next()

    outbox.start_again()

    assert not second.taken.done()
    assert await told(outbox, 2) == ["a", "b"]
    assert first.taken.result() and second.taken.result()


async def test_another_call_is_not_told_what_was_refused_and_its_numbers_are_the_sessions() -> None:
    outbox, (_, refused, _) = filled("a", "too long", "c")
    await told(outbox, 3)
    outbox.refused(refused.number)

    outbox.start_again()

    assert await told(outbox, 2) == ["a", "c"]
    assert numbers(outbox, 2) == [1, 3]


async def test_a_refusal_may_come_before_it_is_known_that_the_message_was_written() -> None:
    outbox, (_, refused) = filled("a", "too long")
    await told(outbox, 1)
    await outbox.next()
    assert outbox.number_of(2) == refused.number == 2
    outbox.refused(refused.number)

    outbox.start_again()

    assert refused.taken.result()
    assert await told(outbox, 1) == ["a"]


async def test_what_is_withdrawn_is_told_to_nobody_and_has_no_number() -> None:
    outbox, (first, withdrawn, third) = filled("a", "b", "c")
    await outbox.next()

    assert [outbox.withdraw(sent) for sent in (first, withdrawn)] == [False, True]

    outbox.written()
    assert await told(outbox, 1) == ["c"]
    assert third.number == 2


async def test_a_message_is_taken_once_a_call_took_it_and_never_where_none_will() -> None:
    outbox, (first, second) = filled("a", "b")

    await told(outbox, 1)
    outbox.close()
    late = outbox.add(message("c"))

    assert [await sent.taken for sent in (first, second, late)] == [True, False, False]


async def test_sessions_of_a_client_share_what_may_be_kept_and_give_it_back() -> None:
    budget = KeptBytes(250)
    first, (sent, _) = filled("a" * 100, "b" * 50, budget=budget)
    second, _ = filled("c" * 100, budget=budget)
    await told(first, 2)
    assert first.keeps_all

    await told(second, 1)
    assert (first.keeps_all, second.keeps_all) == (True, False)

    first.refused(sent.number)
    third, _ = filled("d" * 100, budget=budget)
    await told(third, 1)
    assert third.keeps_all

    first.close()
    third.keep_no_more()
    whole, _ = filled("e" * 230, budget=budget)
    await told(whole, 1)
    assert whole.keeps_all


async def test_what_is_not_kept_is_let_go_once_it_is_written() -> None:
    outbox, (first, second) = filled("a", "b", budget=KeptBytes(0))

    assert await told(outbox, 1) == ["a"]

    assert (first.message, second.message is None, outbox.keeps_all) == (None, False, False)


async def test_what_is_to_be_told_again_is_told_also_when_nothing_more_is_kept() -> None:
    outbox, _ = filled("a", "b")
    await told(outbox, 2)
    outbox.start_again()
    assert await told(outbox, 1) == ["a"]

    outbox.keep_no_more()

    assert await told(outbox, 1) == ["b"]
