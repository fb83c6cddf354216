"""What a session has sent, told to one call and then to another."""

import asyncio

from rachis.v1 import router_pb2 as api

from control_plane.client.outbox import Outbox


def message(text: str) -> api.StreamGenerateRequest:
    return api.StreamGenerateRequest(append=api.SessionAppend(piece=api.SessionPiece(text=text)))


async def told(outbox: Outbox, count: int) -> list[str]:
    """What a call takes of it."""
    texts = []
    for _ in range(count):
        texts.append((await outbox.next()).append.piece.text)
        await outbox.written()
    return texts


async def filled(*texts: str, max_bytes: int = 1000) -> Outbox:
    outbox = Outbox(max_bytes)
    for text in texts:
        await outbox.add(message(text))
    return outbox


async def test_another_call_is_told_everything_in_order() -> None:
    outbox = await filled("a", "b", "c")
    assert await told(outbox, 2) == ["a", "b"]

    outbox.start_again()
    await outbox.add(message("d"))

    assert await told(outbox, 4) == ["a", "b", "c", "d"]
    assert [outbox.number_of(place) for place in (1, 2, 3, 4)] == [1, 2, 3, 4]


async def test_another_call_is_not_told_what_was_refused_and_its_numbers_are_the_sessions() -> None:
    outbox = await filled("a", "too long", "c")
    await told(outbox, 3)
    outbox.refused(2)

    outbox.start_again()

    assert await told(outbox, 2) == ["a", "c"]
    assert [outbox.number_of(place) for place in (1, 2)] == [1, 3]


async def test_a_message_is_sent_once_a_call_took_it_and_never_where_none_will() -> None:
    outbox = await filled("a", "b")
    waiting = [asyncio.create_task(outbox.sent(number)) for number in (1, 2)]

    await told(outbox, 1)
    await outbox.close()

    assert await asyncio.gather(*waiting) == [True, False]


async def test_what_was_told_is_not_kept_over_the_limit_and_not_once_the_answer_has_begun() -> None:
    too_much = await filled("a", "b" * 100, max_bytes=50)
    begun = await filled("a")
    assert (too_much.keeps_all, begun.keeps_all) == (False, True)

    begun.keep_no_more()

    assert not begun.keeps_all
    assert await told(too_much, 2) == ["a", "b" * 100]
